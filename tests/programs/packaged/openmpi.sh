# Four ranks over its TCP transport; all of it is the load.
version() { debian openmpi-bin; }
serve() {
  : >"$dir/served"
  exec sleep 600
}
load() {
  OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 mpirun -np 4 --oversubscribe --mca pml ob1 \
    --mca btl tcp,self --mca btl_tcp_if_include lo --mca mpi_yield_when_idle 1 \
    /usr/bin/python3.11 "$here/packaged/ranks.py" "$dir"
}
