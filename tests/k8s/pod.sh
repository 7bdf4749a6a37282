# A pod without a container engine: a root of its own, read-only but for the volumes that are not, in namespaces that the caller made.
# Of this machine it sees the programs; of the image's own files, those of the clone and its environment.
# Arguments: a directory to mount its root at, its address, its name, its user; then one volume each: WHERE=tmpfs, WHERE=DIRECTORY:ro or :rw
set -euo pipefail
root=$1 address=$2 name=$3 user=$4
shift 4
hostname "$name"
ip link set lo up
until ip link show eth0 > /dev/null 2>&1; do sleep 0.02; done
ip addr add "$address/16" dev eth0
ip link set eth0 up
ip route add default via "${address%.*}.1"
mount --make-rprivate /
mount -t tmpfs -o mode=755 pod "$root"
for entry in /*; do
  case $entry in /proc | /tmp | /run | /etc) mkdir "$root$entry"; continue ;; esac
  if [ -L "$entry" ]; then cp -P "$entry" "$root$entry"; elif [ -d "$entry" ]; then
    mkdir "$root$entry"
    mount --rbind "$entry" "$root$entry"
  fi
done
cp -a /etc/. "$root/etc" 2> /dev/null || true
cp --remove-destination "$HOSTS" "$root/etc/hosts"
rm -f "$root/etc/resolv.conf"
: > "$root/etc/resolv.conf" # names are those of the hosts file alone
echo "weald:x:$user:$user::/tmp:/usr/sbin/nologin" >> "$root/etc/passwd"
mount -t proc proc "$root/proc"
written=
for volume; do
  where=${volume%%=*} what=${volume#*=}
  mkdir -p "$root$where"
  if [ "$what" = tmpfs ]; then mount -t tmpfs -o mode=1777 volume "$root$where"; else mount --bind "${what%:*}" "$root$where"; fi
  case $what in *:ro) ;; *) written="$written $where" ;; esac
done
for kept in $KEPT; do
  [ -e "$root$kept" ] || { mkdir -p "$root$kept"; mount --bind "$kept" "$root$kept"; }
done
mkdir "$root/.host"
cd "$root"
pivot_root . .host
umount -l /.host
rmdir /.host
awk '{print $5}' /proc/self/mountinfo | while read -r point; do
  case " $written /proc " in *" $point "*) continue ;; esac
  case $point in /dev | /dev/* | /proc/* | /sys/*) continue ;; esac
  mount -o remount,bind,ro "$point"
done
echo ready
exec sleep infinity
