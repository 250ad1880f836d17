import java.util.concurrent.TimeUnit;
import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.retry.RetryOneTime;

/** Curator.java HOST:PORT PATH WAIT-MS: "ready", then one try for each line "acquire". */
public class Curator {
    public static void main(String[] args) throws Exception {
        CuratorFramework client = CuratorFrameworkFactory.newClient(args[0], new RetryOneTime(100));
        client.start();
        client.blockUntilConnected();
        InterProcessMutex lock = new InterProcessMutex(client, args[1]);
        java.io.BufferedReader in =
            new java.io.BufferedReader(new java.io.InputStreamReader(System.in));
        System.out.println("ready");
        for (String line; (line = in.readLine()) != null; ) {
            if (line.startsWith("acquire ")) {
                long wait = Long.parseLong(line.substring(8));
                System.out.println(lock.acquire(wait, TimeUnit.MILLISECONDS) ? "held" : "timeout");
            } else if (line.startsWith("bench ")) {
                int n = Integer.parseInt(line.substring(6));
                long start = System.nanoTime();
                for (int i = 0; i < n; i++) {
                    lock.acquire();
                    lock.release();
                }
                System.out.printf("took %d%n", (System.nanoTime() - start) / n / 1000);
            } else if (line.equals("release")) {
                lock.release();
                System.out.println("released");
            }
        }
        client.close();
    }
}
