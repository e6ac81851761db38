"""Scripts, sources and configurations of the servers of handovers.py."""

# What an inetd serves: each line it reads is answered by children, on the same connection.
LINES = "#!/bin/sh\nwhile read -r n; do yes \"$n\" | head -c 200000; done\n"
CGI = "#!/bin/sh\nprintf 'Content-Type: text/plain\\r\\n\\r\\n'\nyes \"$QUERY_STRING\" | head -c 300000\n"
APP = """
def app(environ, start_response):
    n = environ["QUERY_STRING"].encode() + b"\\n"
    start_response("200 OK", [("Content-Length", "65536")])
    return [(n * 65536)[:65536]]
"""
JAVA = """
import java.io.*;
import java.net.*;
public class Helpers {
    public static void main(String[] args) throws Exception {
        ServerSocket l = new ServerSocket(Integer.parseInt(args[0]), 50, InetAddress.getByName("127.0.0.1"));
        for (int i = 0; i < 5; i++) {
            Socket s = l.accept();
            new Thread(() -> echo(s)).start();
        }
        Thread.sleep(700);
        Process last = null;
        for (int i = 0; i < 30; i++) {
            last = new ProcessBuilder("sleep", "1").start();
            Thread.sleep(100);
        }
        if (last.waitFor() == 0) new File(args[1]).createNewFile();
    }
    static void echo(Socket s) {
        try (s) {
            s.getInputStream().transferTo(s.getOutputStream());
        } catch (IOException e) {
            e.printStackTrace();
        }
    }
}
"""
APACHE = """ServerName localhost
PidFile {0}/apache.pid
ErrorLog {0}/apache.log
Listen 127.0.0.1:{1}
User www-data
Group www-data
LoadModule mpm_{2}_module /usr/lib/apache2/modules/mod_mpm_{2}.so
LoadModule authz_core_module /usr/lib/apache2/modules/mod_authz_core.so
LoadModule alias_module /usr/lib/apache2/modules/mod_alias.so
LoadModule {3}_module /usr/lib/apache2/modules/mod_{3}.so
{4}
MaxKeepAliveRequests 0
ScriptAlias /cgi-bin/ {0}/cgi-bin/
"""
LIGHTTPD = """server.modules = ("mod_cgi")
server.document-root = "{0}"
server.bind = "127.0.0.1"
server.port = {1}
server.username = "www-data"
server.groupname = "www-data"
server.max-keep-alive-requests = 1000
$HTTP["url"] =~ "^/cgi-bin/" {{ cgi.assign = ("" => "") }}
"""
NGINX = """{2} user www-data; worker_processes 2; pid {0}/nginx.pid; error_log {0}/nginx.log;
events {{ worker_connections 512; }}
http {{
  access_log off; sendfile on; keepalive_requests 1000000000;
  client_body_temp_path {0}/t1; proxy_temp_path {0}/t2; fastcgi_temp_path {0}/t3;
  uwsgi_temp_path {0}/t4; scgi_temp_path {0}/t5;
  server {{ listen 127.0.0.1:{1}; root {0}; }}
}}
"""
QUERY = "select g.id, md5(g.id::text), repeat(md5((g.id * 7)::text), 4) from rows g join rows h on h.id = g.id order by g.id"
