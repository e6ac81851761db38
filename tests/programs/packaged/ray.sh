# Two raylets; tasks and actors on both, objects of 100 MB between them.
python=$target/programs-full/bin/python
version() { "$python" -c 'import ray; print(ray.__version__)'; }
export RAY_DISABLE_IMPORT_WARNING=1 RAY_USAGE_STATS_ENABLED=0
serve() { exec "$python" "$here/packaged/raylets.py" serve "$port" "$dir"; }
load() { exec "$python" "$here/packaged/raylets.py" load "$port" "$dir"; }
