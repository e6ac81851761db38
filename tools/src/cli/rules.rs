//! The flags of `deny`, `allow` and `rules`.

use clap::Args;

pub const DENY_LONG: &str = "\
Keep connections off lanes by a rule. Connections that the rule is about go down to TCP at their next use \
(reason `operator`), and nothing is lost; new ones stay there (reason `config`). A rule is about a connection \
end that has one of the values of each option that is given. If it keeps one end on TCP, that is where the \
connection is.";

pub const RULES_AFTER: &str = "\
Examples:
  underpass deny --port 5432                         no lanes to or from this port
  underpass deny --namespace shop --uid 0            nor for root's programs in pods of this namespace
  underpass deny --all && underpass allow --program redis-server
                                                     one program alone
  underpass rules                                    in their order: the first that is about an end decides
  underpass rules --delete 1                         what it kept on TCP may be promoted again

What is added here comes before [exclude] and [[rule]] of the daemon's configuration, the newest first, and
stays until it is deleted or the node boots. The configuration's own are read again when the daemon gets
SIGHUP (`systemctl reload underpassd`). For root on the node only.";

#[derive(Debug, Args)]
#[group(required = true, multiple = true)]
pub struct About {
    /// Every connection
    #[arg(long, conflicts_with_all = ["program", "uid", "address", "port", "namespace"])]
    pub all: bool,
    /// Ends in programs of this name, as in /proc/PID/comm; a program can change its own
    #[arg(long, value_name = "NAME")]
    pub program: Vec<String>,
    /// Ends in processes of this user
    #[arg(long, value_name = "UID")]
    pub uid: Vec<u32>,
    /// Connections with this address, or one in this range, at either end
    #[arg(long, value_name = "ADDRESS[/BITS]")]
    pub address: Vec<String>,
    /// Connections with this port at either end
    #[arg(long, value_name = "PORT")]
    pub port: Vec<u16>,
    /// Ends in pods of this Kubernetes namespace
    #[arg(long, value_name = "NAMESPACE")]
    pub namespace: Vec<String>,
}

#[derive(Debug, Args)]
pub struct Rules {
    /// Take away the rule with this number
    #[arg(long, value_name = "NUMBER", conflicts_with = "json")]
    pub delete: Option<usize>,
    /// Print JSON: `added` and `configured`, each in their order
    #[arg(short, long)]
    pub json: bool,
}
