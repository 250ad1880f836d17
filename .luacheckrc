std = "max"
max_line_length = 100
cache = false
files["spec"] = { std = "+busted" }
