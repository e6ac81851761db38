# The package of Python; grpc-cpp: Debian's of C++.
version() { "$target/programs/bin/python" -c 'import grpc; print(grpc.__version__)'; }
serve() { exec "$target/programs/bin/python" -u "$here/rpc.py" serve 127.0.0.1 "$port"; }
load() {
  "$target/programs/bin/python" -u "$here/rpc.py" load 127.0.0.1 "$port" "$dir"
}
case $program in
  grpc-cpp)
    cpp=$target/programs-full/grpc-cpp
    version() { debian libgrpc++-dev; }
    serve() {
      [ "$cpp" -nt "$here/packaged/rpc.cc" ] ||
        g++ -std=c++17 -O1 -o "$cpp" "$here/packaged/rpc.cc" $(pkg-config --cflags --libs grpc++) -pthread
      exec "$cpp" serve "$port" "$dir"
    }
    load() { exec "$cpp" load "$port" "$dir"; }
    ;;
esac
