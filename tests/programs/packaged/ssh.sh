# sshd as packaged (privilege separation, sandbox), files fetched by scp; ssh-rsync: by rsync.
version() { debian openssh-server; }
key() {
  mkdir -p /run/sshd "$dir/ssh"
  chmod 700 "$dir/ssh"
  for k in host user; do ssh-keygen -q -t ed25519 -N '' -f "$dir/ssh/$k"; done
  cp "$dir/ssh/user.pub" "$dir/ssh/authorized"
}
serve() {
  key
  head -c 300000000 /dev/urandom >"$dir/huge"
  exec /usr/sbin/sshd -D -e -p "$port" -o ListenAddress=127.0.0.1 -o "HostKey=$dir/ssh/host" \
    -o "AuthorizedKeysFile=$dir/ssh/authorized" -o StrictModes=no -o UsePAM=yes -o PermitRootLogin=yes \
    -o "PidFile=$dir/ssh/pid" -o "Subsystem=sftp /usr/lib/openssh/sftp-server" -f /dev/null
}
options="-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR -o IdentitiesOnly=yes"
fetch_by() {
  case $program in
    ssh-rsync) rsync -e "ssh -p $port -i $dir/ssh/user $options" "root@127.0.0.1:$dir/huge" "$dir/got" ;;
    *) scp -q -P "$port" -i "$dir/ssh/user" $options "root@127.0.0.1:$dir/huge" "$dir/got" ;;
  esac
}
load() {
  begin
  moved=0
  while [ ! -e "$dir/stop" ]; do
    rm -f "$dir/got"
    fetch_by
    cmp "$dir/huge" "$dir/got"
    moved=$((moved + 300))
  done
  rate "$moved" MB/s
  echo ok
}
