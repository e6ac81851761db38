# NIO with selectors at both ends, which start child processes all the time.
version() { debian openjdk-17-jdk-headless; }
serve() { exec java -Xmx256m "$here/packaged/Echo.java" serve "$port" "$dir"; }
load() { exec java -Xmx256m "$here/packaged/Echo.java" load "$port" "$dir"; }
