# Workers are www-data's.
version() { debian nginx-light; }
serve() {
  nginx_conf "$port"
  exec nginx -c "$dir/nginx.conf" -e "$dir/nginx.log" -g 'daemon off;'
}
