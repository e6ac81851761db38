//! Tests that have a node or more of their own: containers, a cluster, virtual machines.

use crate::steps::{Kind, Step};
use crate::{as_root, made_here, without, Tree};

/// Containers of two real runtimes, each started once; the test program runs its tests in order by itself.
pub fn containers(tree: &Tree, names: &[String]) -> Step {
    let mut c = tree.cargo("test -p underpass-tests --test containers --");
    c.args(names);
    as_root(Step::new("containers", Kind::Tests, 110, c))
}

/// A Kubernetes cluster of one node, with the image; the test program runs its tests in order by itself.
pub fn cluster(tree: &Tree, names: &[String]) -> Step {
    let mut c = tree.cargo("test -p underpass-tests --test cluster --");
    c.args(names);
    as_root(Step::new("cluster", Kind::Tests, 1200, c))
}

/// Without most of the second way's, the device plugin's, what waits for a minute, and what containers' tests do as well.
pub fn cluster_short(tree: &Tree) -> Step {
    let skipped = [
        "without_nri::",
        "the_api_is_away",
        "a_certificate_ends",
        "devices",
        "namespaces_of_the_chart",
        "kinds::a_job",
        "kinds::images",
        "a_new_word",
    ];
    Step {
        budget: 360,
        ..cluster(tree, &without(&skipped))
    }
}

/// Two nodes of a cluster in virtual machines, which have RDMA.
pub fn cluster_lab(tree: &Tree) -> Step {
    Step {
        name: "cluster lab",
        budget: 900,
        ..cluster(tree, &["lab".into()])
    }
}

/// The programs of a cluster; once.
pub fn kubernetes(tree: &Tree) -> Step {
    let build = tree.command("tools/build-kubernetes.sh", &[]);
    Step::new("kubernetes", Kind::Check, 300, build)
}

/// What is done with image and package.
pub fn packaging(tree: &Tree, names: &[String]) -> Step {
    let mut c = tree.cargo("test -p underpass-tests --test packaging -- --test-threads=1");
    c.args(names);
    as_root(Step::new("packaging", Kind::Tests, 80, c))
}

/// The previous version is built, and the two beside each other: on one node, in a cluster, on two nodes with RDMA.
pub fn previous(tree: &Tree) -> Vec<Step> {
    let build = made_here(tree, "previous-build");
    let alone = tree.cargo("test -p underpass-tests --test previous -- --test-threads=1");
    let word = || ["previous".to_string()];
    vec![
        Step {
            name: "previous",
            kind: Kind::Build,
            budget: 700,
            ..build
        },
        as_root(Step::new("beside it", Kind::Tests, 400, alone)),
        Step {
            name: "upgraded",
            ..cluster(tree, &word())
        },
        Step {
            name: "two nodes",
            budget: 300,
            ..lab(tree, &word())
        },
    ]
}

/// Virtual machines, booted once; the test program runs its tests in order by itself.
pub fn lab(tree: &Tree, names: &[String]) -> Step {
    let mut c = tree.cargo("test -p underpass-tests --test lab --");
    c.args(names);
    Step::new("lab", Kind::Tests, 1500, c)
}

/// Streams, ways out of a lane, Redis, both rails cut, both daemons killed, and the ends of programs. The others
/// need iWARP or what only the machines have, are done by the seeds of two daemons as well, or do the same otherwise.
pub fn lab_short(tree: &Tree) -> Step {
    let skipped = [
        "iwarp",
        "verbs_over_each_rail",
        "kernel_modules_on_demand",
        "tcp_between_machines",
        "cut_and_mended",
        "a_carrier",
        "carrier_lost_and_back",
        "same_node_lanes",
        "across_nodes_stays_on_tcp",
        "who_stays_on_tcp",
        "a_capture",
        "check_",
        "iperf3_between_nodes",
        "sockperf_between_nodes",
        "pgbench_between_nodes",
        "a_rail_cut_under_load",
        "a_device_removed_under_load",
        "rails_cut_in_doubt",
        "control_partitioned_under_load",
        "::daemons_killed",
        "nothing_is_left_over",
        "node_gone",
        "programs_end_with_rails_cut",
        "programs_killed_under_load",
        "programs_fork_and_end",
        "rails_cut_under_sleepers",
        "closes_",
        "the_rail_of_the_interface",
        "three_machines",
    ];
    Step {
        budget: 450,
        ..lab(tree, &without(&skipped))
    }
}
