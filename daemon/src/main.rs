//! The command line of the daemon.

// `as` only where a lint exception says why. Tests may: what they lose, they notice.
#![cfg_attr(
    not(test),
    warn(
        clippy::as_ptr_cast_mut,
        clippy::cast_lossless,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_precision_loss,
        clippy::cast_sign_loss,
        clippy::ptr_as_ptr,
        clippy::ref_as_ptr
    )
)]

use clap::{Parser, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use underpass_admin::places::{user_dir, DIR_ENV, SYSTEM_DIR, XDG_ENV};
use underpass_signer::Options as Signer;
use underpassd::config::Config;
use underpassd::daemon::{run, Options};

/// Pairs the ends of TCP connections on this node and makes the link groups that carry them.
#[derive(Parser)]
#[command(name = "underpassd", version, args_conflicts_with_subcommands = true, after_help = limits())]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    /// Runtime directory [default: $UNDERPASS_DIR, else /run/underpass for root,
    /// $XDG_RUNTIME_DIR/underpass or /tmp/underpass-UID for others]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Configuration file (TOML)
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Leave when no program has used the daemon for so long
    #[arg(long, value_name = "SECONDS")]
    idle_exit: Option<u64>,
    /// log2 of the first ring of a lane, in bytes
    #[arg(long, value_name = "N")]
    ring_log2: Option<u8>,
    /// log2 of the largest ring of a lane, in bytes
    #[arg(long, value_name = "N")]
    ring_max_log2: Option<u8>,
    /// Do without the BPF proof: pair ends inside one network namespace only
    #[arg(long)]
    no_bpf: bool,
}

/// What `--help` says of limits.
fn limits() -> String {
    format!(
        "Limits of each tenant (a pod, a login, a service), on this machine, unless [limits] in the configuration says \
         otherwise: {}",
        Config::default().limits()
    )
}

#[derive(Subcommand)]
enum Command {
    /// Signs the certificates of a Kubernetes cluster's nodes, instead of serving one
    Signer(SignerArgs),
    /// Offers a node's RDMA devices and rails to its kubelet as resources, instead of serving a node
    Devices(DevicesArgs),
    /// Answers a Kubernetes cluster's API server, which asks about each new pod, instead of serving a node
    Webhook {
        /// Configuration file (TOML): [webhook] and [pods] count
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
}

#[derive(clap::Args)]
struct SignerArgs {
    /// Namespace of what follows [default: that of the signer's pod]
    #[arg(long, default_value = "", hide_default_value = true)]
    namespace: String,
    /// Secret in which the CA is kept; one without data gets a new CA
    #[arg(long, value_name = "NAME")]
    secret: String,
    /// ConfigMap that tells the nodes whom to trust
    #[arg(long, value_name = "NAME")]
    config_map: String,
    /// Service account of the nodes' daemons
    #[arg(long, value_name = "NAME")]
    account: String,
}

#[derive(clap::Args)]
struct DevicesArgs {
    /// The kubelet's directory of device plugins, which does not depend on its --root-dir
    #[arg(
        long,
        value_name = "DIR",
        default_value = "/var/lib/kubelet/device-plugins"
    )]
    plugins: PathBuf,
    /// The node's /dev
    #[arg(long, value_name = "DIR", default_value = "/dev")]
    dev: PathBuf,
    /// Configuration file (TOML) of the node's daemon: [[rail]] counts
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Resource that gives the daemon's container the node's RDMA devices
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true, value_parser = resource)]
    daemon: String,
    /// Resource that a node has while it has a rail; it gives nothing
    #[arg(long, value_name = "NAME", value_parser = resource)]
    rail: Vec<String>,
}

/// The name of an extended resource: `DOMAIN/NAME`.
fn resource(name: &str) -> Result<String, String> {
    let plain = |s: &str| {
        let inner = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        let ends = |c: char| c.is_ascii_alphanumeric();
        s.len() <= 253 && s.starts_with(ends) && s.ends_with(ends) && s.chars().all(inner)
    };
    match name.split_once('/') {
        None if name.is_empty() => Ok(String::new()),
        Some((domain, rest)) if plain(domain) && plain(rest) && rest.len() <= 63 => Ok(name.into()),
        _ => Err("a resource is DOMAIN/NAME".into()),
    }
}

fn devices(a: DevicesArgs) -> Result<(), String> {
    let config = match &a.config {
        Some(p) => Config::load(p).map_err(|e| e.to_string())?,
        None => Config::default(),
    };
    let options = underpass_kubelet::devices::Options {
        dir: a.plugins,
        daemon: a.daemon,
        rails: a.rail,
        dev: a.dev,
    };
    let sys = underpass_rdma::devices::Tree::system();
    let has_rail = || underpassd::dataplane::has_rail(&sys.scan(), &config.rails());
    underpass_kubelet::devices::run(&options, has_rail).map_err(|e| e.to_string())
}

impl From<SignerArgs> for Signer {
    fn from(a: SignerArgs) -> Signer {
        Signer {
            namespace: a.namespace,
            secret: a.secret,
            config_map: a.config_map,
            account: a.account,
        }
    }
}

fn default_dir() -> PathBuf {
    if let Some(d) = std::env::var_os(DIR_ENV).filter(|d| !d.is_empty()) {
        return d.into();
    }
    let uid = rustix::process::geteuid();
    if uid.is_root() {
        return SYSTEM_DIR.into();
    }
    user_dir(std::env::var_os(XDG_ENV).as_deref(), uid.as_raw())
}

fn options(args: Args) -> Result<Options, underpassd::config::Error> {
    let mut config = match &args.config {
        Some(p) => Config::load(p)?,
        None => Config::default(),
    };
    config.ring_log2 = args.ring_log2.unwrap_or(config.ring_log2);
    config.ring_max_log2 = args.ring_max_log2.unwrap_or(config.ring_max_log2);
    config.proof.bpf &= !args.no_bpf;
    config.check()?;
    Ok(Options {
        dir: args.dir.unwrap_or_else(default_dir),
        config,
        file: args.config,
        idle_exit: args.idle_exit.map(Duration::from_secs),
    })
}

fn webhook(config: &std::path::Path) -> Result<(), String> {
    let c = Config::load(config).map_err(|e| e.to_string())?;
    underpass_webhook::run(c.webhook, c.pods).map_err(|e| e.to_string())
}

/// Colours are for terminals: a journal or a file would keep their escape sequences.
fn colours() -> bool {
    use std::io::IsTerminal;
    std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty())
}

fn main() -> ExitCode {
    let mut args = Args::parse();
    let filter = tracing_subscriber::EnvFilter::try_from_env("UNDERPASSD_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(colours())
        .init();
    let done = match args.command.take() {
        Some(Command::Signer(a)) => underpass_signer::run(a.into()).map_err(|e| e.to_string()),
        Some(Command::Devices(a)) => devices(a),
        Some(Command::Webhook { config }) => webhook(&config),
        None => match options(args) {
            Ok(o) => run(o).map_err(|e| e.to_string()),
            Err(e) => Err(e.to_string()),
        },
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("underpassd: {e}");
            ExitCode::FAILURE
        }
    }
}
