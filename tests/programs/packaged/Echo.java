import java.io.IOException;
import java.net.InetSocketAddress;
import java.nio.ByteBuffer;
import java.nio.channels.*;
import java.nio.file.*;
import java.util.*;
import java.util.concurrent.atomic.AtomicLong;

/** Echo over selectors, both ends of which start child processes now and then. */
public class Echo {
    static void children() {
        Thread t = new Thread(() -> {
            try {
                while (true) {
                    new ProcessBuilder("true").inheritIO().start().waitFor();
                    Thread.sleep(50);
                }
            } catch (Exception e) {
                e.printStackTrace();
                System.exit(1);
            }
        });
        t.setDaemon(true);
        t.start();
    }

    public static void main(String[] args) throws Exception {
        int port = Integer.parseInt(args[1]);
        children();
        if (args[0].equals("serve")) serve(port);
        else load(port, Path.of(args[2]));
    }

    static void serve(int port) throws IOException {
        Selector selector = Selector.open();
        ServerSocketChannel listener = ServerSocketChannel.open();
        listener.bind(new InetSocketAddress("127.0.0.1", port)).configureBlocking(false);
        listener.register(selector, SelectionKey.OP_ACCEPT);
        while (true) {
            selector.select();
            for (Iterator<SelectionKey> i = selector.selectedKeys().iterator(); i.hasNext(); i.remove()) echo(selector, i);
        }
    }

    static void echo(Selector selector, Iterator<SelectionKey> i) throws IOException {
        SelectionKey key = i.next();
        if (key.isAcceptable()) {
            SocketChannel c = ((ServerSocketChannel) key.channel()).accept();
            c.configureBlocking(false);
            c.register(selector, SelectionKey.OP_READ, ByteBuffer.allocateDirect(1 << 16));
            return;
        }
        SocketChannel c = (SocketChannel) key.channel();
        ByteBuffer b = (ByteBuffer) key.attachment();
        if (key.isReadable() && c.read(b) < 0) {
            c.close();
            return;
        }
        b.flip();
        c.write(b);
        b.compact();
        key.interestOps((b.hasRemaining() ? SelectionKey.OP_READ : 0) | (b.position() > 0 ? SelectionKey.OP_WRITE : 0));
    }

    static void load(int port, Path dir) throws Exception {
        Files.createFile(dir.resolve("begun"));
        long begin = System.nanoTime();
        AtomicLong rounds = new AtomicLong();
        List<Thread> threads = new ArrayList<>();
        for (int n = 0; n < 4; n++) {
            Random random = new Random(n);
            Thread t = new Thread(() -> {
                try (SocketChannel c = SocketChannel.open(new InetSocketAddress("127.0.0.1", port))) {
                    for (int k = 0; k % 16 != 0 || !Files.exists(dir.resolve("stop")); k++) {
                        round(c, new byte[random.nextInt(k % 10 == 0 ? 100_000 : 500) + 1], random);
                        rounds.incrementAndGet();
                    }
                } catch (Exception e) {
                    e.printStackTrace();
                    System.exit(1);
                }
            });
            t.start();
            threads.add(t);
        }
        for (Thread t : threads) t.join();
        System.out.println("rate " + rounds.get() * 1e9 / (System.nanoTime() - begin) + " round-trips/s");
        System.out.println("ok");
    }

    static void round(SocketChannel c, byte[] sent, Random random) throws IOException {
        random.nextBytes(sent);
        for (ByteBuffer b = ByteBuffer.wrap(sent); b.hasRemaining(); ) c.write(b);
        ByteBuffer back = ByteBuffer.allocate(sent.length);
        while (back.hasRemaining()) if (c.read(back) < 0) throw new IOException("early end");
        if (!Arrays.equals(sent, back.array())) throw new IOException("BYTES DIFFER");
    }
}
