//! Tests in the lab: two virtual machines with two RDMA rails each, booted once for all tests,
//! which run one after the other (`make lab`; `make lab ARGS=name` for some).
//!
//! A test must not count on what an earlier one left, and none passes that did not run: where
//! there is no emulator or kernel, all of them are reported as ignored.

mod across;
mod iwarp;
mod loss;
mod programs;
mod rails;
mod three;
mod underpass;
mod verbs;

use anyhow::{anyhow, bail, Result};
use libtest_mimic::{Arguments, Failed, Trial};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use underpass_tests::lab::{cluster, Lab, Spec};

/// The agent that cargo built for this test.
const AGENT: &str = env!("CARGO_BIN_EXE_lab-agent");

type Test = fn(&mut Lab) -> Result<()>;

/// With this word as its argument the program runs this test, otherwise all others (`make previous`).
const PREVIOUS: (&str, Test) = ("previous", across::previous::builds_on_two_nodes);

/// In the order of what rests on what.
const TESTS: &[(&str, Test)] = &[
    ("two_rails_each", rails::two_rails_each),
    ("verbs_over_each_rail", rails::verbs_over_each_rail),
    ("kernel_modules_on_demand", rails::kernel_modules_on_demand),
    ("iwarp_rails", iwarp::iwarp_rails),
    ("tcp_between_machines", programs::tcp_between_machines),
    ("rail_cut_and_mended", loss::rail_cut_and_mended),
    ("control_cut_and_mended", loss::control_cut_and_mended),
    ("carrier_lost_and_back", loss::carrier_lost_and_back),
    ("same_node_lanes", underpass::same_node_lanes),
    (
        "across_nodes_stays_on_tcp",
        underpass::across_nodes_stays_on_tcp,
    ),
    ("node_gone", loss::node_gone),
    ("across::streams_over_tcp", across::plain::streams_over_tcp),
    ("across::who_stays_on_tcp", across::left::who_stays_on_tcp),
    ("across::over_iwarp", across::iwarp::over_iwarp),
    (
        "across::iwarp_beside_roce",
        across::iwarp::iwarp_beside_roce,
    ),
    ("across::ways_out", across::departures::ways_out),
    (
        "across::a_capture_on_either_node",
        across::captured::a_capture_on_either_node,
    ),
    (
        "across::a_capture_through_cuts_and_a_restart",
        across::captured::a_capture_through_cuts_and_a_restart,
    ),
    (
        "across::a_capture_of_much",
        across::captured::a_capture_of_much,
    ),
    (
        "across::check_measures_both_ways",
        across::measure::check_measures_both_ways,
    ),
    (
        "across::check_of_the_kernels_smc",
        across::measure::check_of_the_kernels_smc,
    ),
    (
        "across::redis_between_nodes",
        across::unmodified::redis_between_nodes,
    ),
    (
        "across::iperf3_between_nodes",
        across::unmodified::iperf3_between_nodes,
    ),
    (
        "across::sockperf_between_nodes",
        across::unmodified::sockperf_between_nodes,
    ),
    (
        "across::pgbench_between_nodes",
        across::unmodified::pgbench_between_nodes,
    ),
    (
        "across::the_rail_of_the_interface",
        across::rails::the_rail_of_the_interface,
    ),
    (
        "across::a_rail_cut_under_load",
        across::rails::a_rail_cut_under_load,
    ),
    (
        "across::both_rails_cut_under_load",
        across::rails::both_rails_cut_under_load,
    ),
    (
        "across::rails_cut_in_doubt",
        across::rails::rails_cut_in_doubt,
    ),
    (
        "across::a_carrier_lost_under_load",
        across::rails::a_carrier_lost_under_load,
    ),
    (
        "across::a_device_removed_under_load",
        across::rails::a_device_removed_under_load,
    ),
    (
        "across::daemons_killed_under_load",
        across::daemons::daemons_killed_under_load,
    ),
    (
        "across::both_daemons_killed_under_load",
        across::daemons::both_daemons_killed_under_load,
    ),
    (
        "across::daemons_killed_before_the_end",
        across::daemons::daemons_killed_before_the_end,
    ),
    (
        "across::nothing_is_left_over",
        across::daemons::nothing_is_left_over,
    ),
    ("across::programs_end", across::programs::programs_end),
    (
        "across::programs_fork_and_end",
        across::inherited::programs_fork_and_end,
    ),
    (
        "across::closes_that_linger",
        across::closes::closes_that_linger,
    ),
    (
        "across::closes_nobody_sees",
        across::closes::closes_nobody_sees,
    ),
    (
        "across::programs_killed_under_load",
        across::programs::programs_killed_under_load,
    ),
    (
        "across::programs_end_with_rails_cut",
        across::programs::programs_end_with_rails_cut,
    ),
    (
        "across::rails_cut_under_sleepers",
        across::programs::rails_cut_under_sleepers,
    ),
    (
        "across::control_partitioned_under_load",
        across::nodes::control_partitioned_under_load,
    ),
    (
        "across::a_node_gone_under_load",
        across::nodes::a_node_gone_under_load,
    ),
];

/// The pair of machines.
enum Pair {
    NotBooted,
    On(Box<Lab>),
    DoesNotBoot,
}

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    // Machines end with the thread that booted them: this one.
    args.test_threads = Some(1);
    let lacks = Lab::lacks();
    if let Some(what) = &lacks {
        eprintln!("lab: ALL TESTS SKIPPED: {what} (`make lab` installs what is missing)");
    }
    let pair = Arc::new(Mutex::new(Pair::NotBooted));
    let previous = args.filter.as_deref() == Some(PREVIOUS.0);
    let tests = if previous { &[PREVIOUS][..] } else { TESTS };
    let mut trials: Vec<Trial> = tests
        .iter()
        .map(|&(name, test)| {
            let pair = Arc::clone(&pair);
            Trial::test(name, move || in_pair(&pair, test))
        })
        .collect();
    let p = Arc::clone(&pair);
    trials.push(Trial::test("three_machines", move || {
        // Five at a time would be too many.
        *p.lock().unwrap_or_else(PoisonError::into_inner) = Pair::NotBooted;
        let mut lab = Lab::boot(three::spec(AGENT)).map_err(|e| format!("{e:#}"))?;
        judged(&mut lab, three::three_machines)
    }));
    let trials = trials
        .into_iter()
        .map(|t| t.with_ignored_flag(lacks.is_some()))
        .collect();
    let conclusion = libtest_mimic::run(&args, trials);
    drop(pair);
    conclusion.exit_code()
}

fn in_pair(pair: &Mutex<Pair>, test: Test) -> Result<(), Failed> {
    let mut pair = pair.lock().unwrap_or_else(PoisonError::into_inner);
    if matches!(*pair, Pair::NotBooted) {
        // Once is enough to know.
        *pair = Pair::DoesNotBoot;
        *pair = Pair::On(Box::new(
            Lab::boot(Spec::pair(AGENT)).map_err(|e| format!("{e:#}"))?,
        ));
    }
    match &mut *pair {
        Pair::On(lab) => judged(lab, test),
        _ => Err("the machines did not boot, see the first test".into()),
    }
}

/// Runs a test; if it fails, both consoles and all that ran are part of its message.
fn judged(lab: &mut Lab, test: Test) -> Result<(), Failed> {
    let done = lab.restore().and_then(|()| {
        lab.evidence(); // of the tests before
        cluster::complaint();
        test(lab)?;
        if let Some(told) = cluster::complaint() {
            bail!("{told}");
        }
        lab.complaint()
            .map_or(Ok(()), |c| Err(anyhow!("the kernel complains: {c}")))
    });
    done.map_err(|e| Failed::from(format!("{e:#}\n{}", lab.evidence())))
}
