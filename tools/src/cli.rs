//! The command line: one table of flags from which parsing, help, completions and manual pages
//! are made.

mod capture;
mod check;
mod rules;
mod show;

use capture::{CAPTURE_AFTER, CAPTURE_LONG};
use check::{CHECK_AFTER, CHECK_LONG};
use clap::{Args, Parser, Subcommand};
use rules::{DENY_LONG, RULES_AFTER};
use show::{SS_AFTER, SS_LONG, TOP_AFTER};
use std::ffi::OsString;
use std::path::PathBuf;

pub use capture::Capture;
pub use check::{Check, Serve};
pub use rules::{About, Rules};
pub use show::{Ss, Top, View};

const ABOUT: &str =
    "Carries TCP connections of unmodified programs underneath TCP, and shows and steers them";

const LONG_ABOUT: &str = "\
Carries the bytes of ordinary TCP connections underneath TCP: through shared memory when both ends \
are on one node, through RDMA when they are on two, and through the TCP connection itself whenever \
neither is possible. Programs are \
not changed: `underpass run` starts them with the shim libunderpass.so preloaded, and the daemon \
underpassd brings the two ends of a connection together. Every connection starts as plain TCP, is \
promoted when both ends run under Underpass, and can go back to TCP at any moment without losing a \
byte. A connection that stays on TCP has a reason on each end; `underpass ss -e` says it in words.";

const EXAMPLES: &str = "\
Examples:
  underpass run redis-server --port 7000      start a server under the shim
  underpass run redis-cli -p 7000 ping        and a client
  underpass ss                                which connections are accelerated?
  underpass ss -e                             and if not, why, and what to do about it
  underpass top                               what do they move now?
  underpass check 127.0.0.1 7000              what would a connection to there get?
  underpass down --all                        everything back to TCP, live; `up --all` undoes it

Environment:
  UNDERPASS_DIR   runtime directory: which daemon to use (default: /run/underpass if a daemon
                  answers there, and for root; else $XDG_RUNTIME_DIR/underpass or /tmp/underpass-UID)
  UNDERPASS_LIB   path of libunderpass.so for `run` and `check`
  UNDERPASS       for programs under the shim: `off` switches it off, `eager` promotes at once

Exit status: 0 success, 1 failure, 2 wrong usage. `run` and `check` have their own, see their help.";

#[derive(Debug, Parser)]
#[command(name = "underpass", version, about = ABOUT, long_about = LONG_ABOUT, after_help = EXAMPLES,
          max_term_width = 100, disable_help_subcommand = false)]
pub struct Cli {
    /// Runtime directory of the daemon to use
    #[arg(
        long,
        global = true,
        value_name = "DIR",
        long_help = "Runtime directory of the daemon to use. Without it: $UNDERPASS_DIR, else \
                       /run/underpass if a daemon answers there, and for root; else \
                       $XDG_RUNTIME_DIR/underpass or /tmp/underpass-UID."
    )]
    pub dir: Option<PathBuf>,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    #[command(about = "Start a program under the shim", long_about = RUN_LONG, after_help = RUN_AFTER)]
    Run(Run),
    #[command(version, disable_version_flag = true, about = "Show connections and listening sockets, as smcss does", long_about = SS_LONG, after_long_help = SS_AFTER)]
    Ss(Ss),
    /// Show connections, pods and rails with what they move now, until you leave
    #[command(after_help = TOP_AFTER)]
    Top(Top),
    /// Show the counters of the daemon and of all programs under the shim
    #[command(after_help = STATS_AFTER)]
    Stats(Json),
    /// List every reason code with its meaning and what to do about it
    Reasons(Json),
    /// Send connections down to TCP, live, and keep them there
    #[command(after_help = STEER_EXAMPLES)]
    Down(Steer),
    /// Let connections be promoted again that `down` sent to TCP, and new ones of programs whose fuse has blown
    #[command(after_help = STEER_EXAMPLES)]
    Up(Steer),
    #[command(about = "Keep connections off lanes, those that are there and those to come, by rule", long_about = DENY_LONG, after_help = RULES_AFTER)]
    Deny(About),
    /// Let connections have lanes that a later rule denies
    #[command(after_help = RULES_AFTER)]
    Allow(About),
    /// Show the rules in their order, or take one away
    #[command(after_help = RULES_AFTER)]
    Rules(Rules),
    #[command(about = "Write what one connection's lane carries as packets, for Wireshark", long_about = CAPTURE_LONG, after_help = CAPTURE_AFTER)]
    Capture(Capture),
    /// Show the events that programs under the shim reported, newest last
    Log(Json),
    /// Show the other nodes and the channels to their daemons
    #[command(after_help = PEERS_AFTER)]
    Peers(Json),
    /// Show this node's containers: which of them asked for the shim, which have it, and why not
    #[command(after_help = PODS_AFTER)]
    Pods(Pods),
    /// Show this node's RDMA devices, and why one of them carries no lanes
    #[command(after_help = DEVICES_AFTER)]
    Devices(Json),
    #[command(subcommand, about = "Make and show certificates of nodes", after_help = CERTS_AFTER)]
    Certs(Certs),
    #[command(about = "Test live which mode a connection from here to HOST:PORT gets", long_about = CHECK_LONG, after_help = CHECK_AFTER)]
    Check(Check),
    /// Print a completion script for a shell
    #[command(
        after_help = "Example: underpass completions bash > /usr/share/bash-completion/completions/underpass"
    )]
    Completions { shell: clap_complete::Shell },
    /// Print a manual page, or write all of them
    #[command(
        after_help = "Example: underpass man | man -l -\n         underpass man ss | man -l -"
    )]
    Man {
        /// Subcommand whose page is wanted
        #[arg(value_name = "COMMAND")]
        page: Option<String>,
        /// Write every page into this directory instead
        #[arg(long, value_name = "DIRECTORY", conflicts_with = "page")]
        out: Option<PathBuf>,
    },
    /// Half of `run`: leaves the session, starts the daemon, prints its pid, ends
    #[command(name = "__daemon", hide = true)]
    StartDaemon {
        program: PathBuf,
        runtime_dir: PathBuf,
    },
    /// Half of `check`: the connection itself, under the shim or without
    #[command(name = "__probe", hide = true)]
    Probe { args: Vec<OsString> },
}

const PODS_AFTER: &str = "\
Columns: Wanted (did the pod ask?), Has it (the shim), and its connections through shared memory (SMCD), \
through RDMA (SMCR) and on TCP. Where a container asked and has not got the shim, or has it and cannot \
use it (its programs are linked statically), the line below says why. -j prints an object: runtime (its \
NRI socket; empty: this daemon does not look after containers) and \
rows with at (namespace, pod, container, sandbox, id), wanted, injected, why_not, smcd, smcr, tcp.

A pod asks with the annotation underpass.io/enabled: \"true\"; underpass.io/containers: \"web,app\" names \
some of its containers. What the daemon's configuration says of namespaces and of other annotations is \
under [pods]. Shown to root on the node only.";

const RUN_LONG: &str = "\
Start PROGRAM with libunderpass.so preloaded. The program keeps its process id, descriptors and exit \
status; only LD_PRELOAD (the shim comes behind what is there), ASAN_OPTIONS (programs linked with \
GCC's AddressSanitizer accept the shim before their runtime: verify_asan_link_order=0), UNDERPASS_DIR \
and, with --eager, UNDERPASS are set, and children inherit them.

The system's daemon is used if it answers. Otherwise a daemon for this user is used (for root, the \
system's: its programs may change their user), and started if none is running; it ends by itself some time after the last program under it has ended. Its messages \
are in underpassd.log in the runtime directory.

The library is looked for in $UNDERPASS_LIB, beside this command, in ../lib and ../lib/underpass from \
there, and in /usr/lib/underpass.

With --verify the program is run as a child, and watched together with everything that it starts, for \
10 seconds (--wait) or until all have ended; what still runs then is told to end (SIGTERM, later \
SIGKILL). Afterwards standard error says for each whether it has the library, whether it reaches a \
daemon, and why not, as `underpass check --pid` does. A program that lives for less than some 20 ms \
may be missed.";

const RUN_AFTER: &str = "\
Examples:
  underpass run nginx -g 'daemon off;'
  underpass run --eager -- curl http://localhost:8080/
  underpass run bash                          everything that is started from this shell
  underpass run --verify --wait 5 nginx       do its workers carry the library?

Exit status: the program's; 127 if it was not found, 126 if it cannot be executed, 125 if Underpass
itself failed (no library, or the daemon did not start), 2 for wrong usage. With --verify: 0 if the
program and all that it started carry the library and reach a daemon, 1 if one does not, 2 if none
lived long enough to be looked at.";

#[derive(Debug, Args)]
pub struct Run {
    /// Promote connections at their first call instead of after some use (for tests)
    #[arg(long)]
    pub eager: bool,
    /// Watch the program and what it starts, and say whether they carry the library and reach a daemon
    #[arg(long)]
    pub verify: bool,
    /// With --verify: seconds after which the program is told to end
    #[arg(long, value_name = "SECONDS", default_value_t = 10, requires = "verify", value_parser = clap::value_parser!(u64).range(1..=86400))]
    pub wait: u64,
    /// With --verify: report in JSON
    #[arg(long, requires = "verify")]
    pub json: bool,
    /// Program to start, and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    pub command: Vec<OsString>,
}

#[derive(Debug, Args)]
pub struct Pods {
    /// Show pods in this Kubernetes namespace only
    #[arg(short, long, value_name = "NAMESPACE")]
    pub namespace: Option<String>,
    /// Print JSON
    #[arg(short, long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct Json {
    /// Print JSON
    #[arg(short, long)]
    pub json: bool,
}

const STATS_AFTER: &str = "\
Byte counters of programs that have ended are included. A rail is a port of an RDMA device that carries \
connections to other nodes, or has; its links are named after the nodes for root on the node only.";

const STEER_EXAMPLES: &str = "\
Examples:
  underpass down --pid 4711                          every connection of a process
  underpass down --inode 81234                       the socket with this inode (see `underpass ss`)
  underpass down 127.0.0.1:6379 127.0.0.1:40112      one connection, by its two addresses
  underpass up --all

Nothing is lost: bytes under way arrive in order, on whichever path. Exit status: 0 if any
connection was told, 1 if none matched.";

#[derive(Debug, Args)]
pub struct Steer {
    /// Every connection the caller may steer
    #[arg(long, conflicts_with_all = ["pid", "inode", "local"])]
    pub all: bool,
    /// Every connection of this process
    #[arg(long, value_name = "PID", conflicts_with_all = ["inode", "local"])]
    pub pid: Option<u32>,
    /// The connection with this socket inode
    #[arg(long, value_name = "INODE", conflicts_with = "local")]
    pub inode: Option<u64>,
    /// One end's address, IP:PORT
    #[arg(requires = "peer", value_parser = crate::addr::argument,
          required_unless_present_any = ["all", "pid", "inode"])]
    pub local: Option<String>,
    /// The other end's address, IP:PORT
    #[arg(value_parser = crate::addr::argument)]
    pub peer: Option<String>,
}

const DEVICES_AFTER: &str = "\
Lanes: yes, or port-down, no-gid (no RoCE v2 address; with iWARP, no IP address), no-uverbs (ib_uverbs \
is not loaded, or the device is being removed), unknown-transport. Needs no daemon and no RDMA library. \
Like smc_rnics.";

const PEERS_AFTER: &str = "\
For root on the node. With -j: node (this one), peers, and refused: who connected to the daemon and
was refused before it was certain who it is. Times are seconds since 1970.";

const CERTS_AFTER: &str = "\
Examples:
  underpass certs ca --out /root/underpass-ca              once, in a safe place
  underpass certs node node1.example --ca /root/underpass-ca --out /tmp/n
  underpass certs show /etc/underpass/tls/node.crt

On each node: ca.crt, and the node's certificate and key, as [tls] in the daemon's configuration
names them. ca.key belongs on no node. The daemon reads replaced files by itself.";

#[derive(Debug, Subcommand)]
pub enum Certs {
    /// Make a CA: ca.crt and ca.key
    Ca(CertsCa),
    /// Make the certificate of a node: NAME.crt and NAME.key
    Node(CertsNode),
    /// Show what certificates say
    Show(CertsShow),
}

#[derive(Debug, Args)]
pub struct CertsCa {
    /// Directory for the files
    #[arg(long, value_name = "DIRECTORY", default_value = ".")]
    pub out: PathBuf,
    /// Common name of the CA
    #[arg(long, default_value = "underpass CA")]
    pub name: String,
    /// Days until it expires
    #[arg(long, default_value_t = 3650, value_parser = clap::value_parser!(u32).range(1..=36500))]
    pub days: u32,
    /// Replace files that exist
    #[arg(long)]
    pub force: bool,
}

#[derive(Debug, Args)]
pub struct CertsNode {
    /// Name of the node, as in `[node]` and `[[peer]]` of the daemons' configuration
    pub name: String,
    /// Further names to put into it
    #[arg(long, value_name = "NAME")]
    pub also: Vec<String>,
    /// Directory with ca.crt and ca.key
    #[arg(long, value_name = "DIRECTORY", default_value = ".")]
    pub ca: PathBuf,
    /// Directory for the files
    #[arg(long, value_name = "DIRECTORY", default_value = ".")]
    pub out: PathBuf,
    /// Days until it expires
    #[arg(long, default_value_t = 365, value_parser = clap::value_parser!(u32).range(1..=36500))]
    pub days: u32,
    /// Replace files that exist
    #[arg(long)]
    pub force: bool,
}

impl CertsNode {
    pub fn names(&self) -> impl Iterator<Item = &String> {
        std::iter::once(&self.name).chain(&self.also)
    }
}

#[derive(Debug, Args)]
pub struct CertsShow {
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Print JSON
    #[arg(short, long)]
    pub json: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn ok(args: &str) -> Cli {
        Cli::try_parse_from(args.split_whitespace()).unwrap_or_else(|e| panic!("{args}: {e}"))
    }

    fn wrong(args: &str) {
        let e = Cli::try_parse_from(args.split_whitespace()).expect_err(args);
        assert!(e.use_stderr() && e.exit_code() == 2, "{args}: {e}");
    }

    #[test]
    fn the_table_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn run_leaves_the_programs_options_alone() {
        for line in [
            "underpass run --eager --dir /d prog --eager -x --dir /e -- y",
            "underpass run --dir /d --eager -- prog --eager -x --dir /e -- y",
            "underpass --dir /d run --eager prog --eager -x --dir /e -- y",
        ] {
            let c = ok(line);
            assert_eq!(c.dir.as_deref(), Some("/d".as_ref()), "{line}");
            let Command::Run(r) = c.command else {
                panic!("{line}")
            };
            assert!(r.eager);
            assert_eq!(
                r.command,
                ["prog", "--eager", "-x", "--dir", "/e", "--", "y"],
                "{line}"
            );
        }
        wrong("underpass run");
        wrong("underpass run --eager");
        wrong("underpass run --unknown prog");
    }

    #[test]
    fn ss_options_combine_as_in_smcss() {
        for good in [
            "", "-a", "-l", "-d", "-ad", "-D", "-adDW", "-R", "-adRW", "-lW", "-ej", "-aDje",
            "-lje",
        ] {
            ok(&format!("underpass ss {good}"));
        }
        for bad in ["-la", "-ld", "-lD", "-lR", "-DR", "-x", "extra"] {
            wrong(&format!("underpass ss {bad}"));
        }
        let Command::Ss(s) = ok("underpass ss -a --debug -D --wide --explain --json").command
        else {
            panic!()
        };
        assert!(
            s.all && s.debug && s.smcd && s.wide && s.explain && s.json && !s.listening && !s.smcr
        );
    }

    #[test]
    fn intervals_may_be_left_out_and_are_bounded() {
        let of = |line: &str| match ok(&format!("underpass ss {line}")).command {
            Command::Ss(s) => s.watch.map(|d| d.as_millis()),
            _ => None,
        };
        assert_eq!(of("-a"), None);
        assert_eq!(of("--watch"), Some(2000));
        assert_eq!(of("--watch -aj"), Some(2000));
        assert_eq!(of("--watch 0.5 -W"), Some(500));
        for bad in ["0", "-1", "x", "nan", "inf", "86401"] {
            wrong(&format!("underpass ss --watch={bad}"));
        }
    }

    #[test]
    fn down_needs_exactly_one_target() {
        for good in [
            "--all",
            "--pid 1",
            "--inode 5",
            "127.0.0.1:1 127.0.0.1:2",
            "::1:1 [::1]:2",
        ] {
            ok(&format!("underpass down {good}"));
            ok(&format!("underpass up {good}"));
        }
        for bad in [
            "",
            "--pid x",
            "--pid 1 --all",
            "127.0.0.1:1",
            "1.2.3.4:1 5.6.7.8",
            "--all 1.2.3.4:1 1.2.3.4:2",
        ] {
            wrong(&format!("underpass down {bad}"));
        }
    }
}
