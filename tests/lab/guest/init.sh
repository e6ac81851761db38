#!/bin/busybox sh
# First process of a lab machine. It makes the host's file system, which is read-only, the root of
# the machine, with a layer of memory above it that takes what the machine writes, and starts the
# agent there. The machine ends with the agent.
#
# /lab.conf says MODULES (path on the host that has lib/modules/$KERNEL) and AGENT (the program);
# the kernel's command line says LABNODE.
B=/bin/busybox
. /lab.conf

end() {
  echo "lab: $1"
  $B poweroff -f
}

$B mount -t proc proc /proc
$B mount -t sysfs sys /sys
$B mount -t devtmpfs dev /dev
for m in /mods/*.ko; do
  $B insmod "$m" || end "no module $m"
done

$B mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144,ro,cache=loose host /host || end "no host"
$B mount -t tmpfs layer /layer
$B mkdir /layer/upper /layer/work
$B mount -t overlay -o lowerdir=/host,upperdir=/layer/upper,workdir=/layer/work root /root || end "no root"

# What belongs to a running system is the machine's own.
$B mount -t proc proc /root/proc
$B mount -t sysfs sys /root/sys
$B mount -t devtmpfs dev /root/dev
$B mkdir -p /root/dev/shm /root/dev/pts /root/run
$B mount -t tmpfs shm /root/dev/shm
$B mount -t devpts pts /root/dev/pts
$B mount -t tmpfs run /root/run
$B mkdir -m 1777 /root/run/lock
$B mount -t cgroup2 cgroup /root/sys/fs/cgroup
$B mount -t bpf bpf /root/sys/fs/bpf

# Everything else that the kernel or a program asks for is loaded from the host's copy; the
# kernel's own requests come to /sbin/modprobe of this first root.
$B mkdir -p /root/lib/modules
$B ln -sfn "$MODULES/lib/modules/$KERNEL" "/root/lib/modules/$KERNEL"
$B printf '#!/bin/busybox sh\nexec /bin/busybox chroot /root /sbin/modprobe "$@"\n' >/sbin/modprobe
$B chmod 755 /sbin/modprobe

$B hostname "lab$LABNODE"
$B ip link set lo up
# Quiet until here; from now on the console has what the kernel warns of.
echo 5 >/proc/sys/kernel/printk
echo "lab: up after $($B cut -d' ' -f1 /proc/uptime) s"
$B chroot /root "$AGENT" serve
end "the agent ended"
