# apache-MODEL: with that module for its processes and threads.
version() { debian apache2; }
serve() {
  # Idle processes too many would be ended, and with them connections that are kept alive.
  case $program in *-prefork) start=12 ;; *) start=2 ;; esac
  cat >"$dir/apache.conf" <<EOF
ServerRoot /etc/apache2
ServerName localhost
PidFile $dir/apache.pid
ErrorLog $dir/apache.log
Listen 127.0.0.1:$port
User www-data
Group www-data
LoadModule mpm_${program#apache-}_module /usr/lib/apache2/modules/mod_mpm_${program#apache-}.so
LoadModule authz_core_module /usr/lib/apache2/modules/mod_authz_core.so
DocumentRoot $dir/www
KeepAlive On
MaxKeepAliveRequests 0
StartServers $start
<Directory $dir/www>
  Require all granted
</Directory>
EOF
  exec apache2 -d /etc/apache2 -f "$dir/apache.conf" -DFOREGROUND
}
