# As its own user, who keeps his cookie in its home directory.
version() { debian rabbitmq-server; }
settings() {
  export RABBITMQ_NODENAME="up$port@localhost" RABBITMQ_NODE_IP_ADDRESS=127.0.0.1 RABBITMQ_NODE_PORT="$port" \
    RABBITMQ_DIST_PORT="$back" RABBITMQ_MNESIA_BASE="$dir/rabbit/db" RABBITMQ_LOG_BASE="$dir/rabbit/log" \
    RABBITMQ_PID_FILE="$dir/rabbit/pid" RABBITMQ_ENABLED_PLUGINS_FILE="$dir/rabbit/plugins" \
    RABBITMQ_CONFIG_FILE="$dir/rabbit/none" HOME="$dir/rabbit"
}
serve() {
  mkdir "$dir/rabbit"
  echo '[].' >"$dir/rabbit/plugins"
  chown -R rabbitmq "$dir/rabbit"
  settings
  cd "$dir/rabbit"
  epmd & # else the server starts one that outlives it
  exec setpriv --reuid rabbitmq --regid rabbitmq --clear-groups /usr/lib/rabbitmq/bin/rabbitmq-server
}
stop() { until_pid "$dir/rabbit/pid"; }
load() { /usr/bin/python3.11 "$here/packaged/amqp.py" "$port" "$dir"; }
