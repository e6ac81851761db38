//! libibverbs is wanted only when it is used: a program with all of this crate starts without it.

use underpass_ibv::Ibv;
use underpass_rdma::devices::Tree;
use underpass_rdma::verbs::{Live, Provider};

fn loaded() -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.contains("libibverbs") || maps.contains("librdmacm")
}

#[test]
fn the_library_comes_when_it_is_wanted() {
    assert!(!loaded(), "linked, instead of found at run time");
    let ibv = Ibv::new().expect("libibverbs-dev is a build dependency, so the library is here");
    assert!(loaded());
    // Both ways of looking find the same devices: none, on most machines.
    let ids: Vec<_> = Tree::system()
        .scan()
        .into_iter()
        .filter(|d| d.verbs.is_some())
        .map(|d| d.id)
        .collect();
    assert_eq!(ibv.scan().unwrap(), ids);
    assert_eq!(ibv.live(), Live::default());
}
