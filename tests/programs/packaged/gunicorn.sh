serve() {
  cat >"$dir/app.py" <<EOF
import os
def app(environ, start_response):
    with open("$dir/www" + environ["PATH_INFO"], "rb") as f:
        body = f.read()
    start_response("200 OK", [("Content-Length", str(len(body)))])
    return [body]
EOF
  exec gunicorn --chdir "$dir" -u www-data -g www-data -w 2 -k gthread --keep-alive 60 \
    -b "127.0.0.1:$port" app:app
}
