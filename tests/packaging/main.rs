//! What is given to other people: the image runs in a container, the package installs, serves, upgrades and goes without
//! a trace. `make packaging` makes both and runs this. Needs root.

mod containerd;
mod deb;
mod image;
mod root;
