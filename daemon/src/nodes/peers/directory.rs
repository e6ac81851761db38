//! Which node holds which address, and where its daemon listens.
//!
//! Everything that a peer daemon says about addresses is checked against this, so a directory must
//! never give one address to two nodes. It comes from the configuration file, or from the API of a
//! Kubernetes cluster.

mod cluster;

pub use cluster::ClusterDirectory;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;
use tokio::sync::watch;
use underpass_admin::certificate::valid_name;

/// Name of a node: the DNS name in its certificate.
pub type Name = Arc<str>;

/// Where daemons listen for each other unless the configuration says otherwise.
pub const PORT: u16 = 7471;

/// Who holds an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Owner {
    /// This node, or no node in particular (loopback): never looked for on other nodes.
    Own,
    Peer(Name),
    /// Not listed: outside these nodes, or translated on the way.
    Nobody,
}

/// The nodes that this daemon works with.
pub trait Directory {
    fn own(&self) -> &Name;
    /// The entry for `node`, if it is a peer.
    fn find(&self, node: &str) -> Option<Peer>;
    fn peers(&self) -> Vec<Peer>;
    /// Who may speak for an address.
    fn owner(&self, ip: IpAddr) -> Owner;
    /// Where the holder of an address is looked for: nobody's are looked for everywhere.
    fn place(&self, ip: IpAddr) -> Owner {
        self.owner(ip)
    }
    /// A connection to this address was found there. (Whose it is should be known at the next start, too.)
    fn met(&self, _ip: IpAddr) {}
    /// A number that changes with the directory; `None`: it never does.
    fn changes(&self) -> Option<watch::Receiver<u64>> {
        None
    }
    /// One that changes only when nodes do.
    fn generation(&self) -> u64 {
        0
    }
}

/// Is it this node's, whatever a directory says?
fn is_own(ip: IpAddr) -> bool {
    let ip = ip.to_canonical();
    ip.is_loopback() || ip.is_unspecified()
}

/// A peer node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    pub name: Name,
    /// Host (address or name) and port of its daemon.
    pub control: (String, u16),
    /// When it became a node, in seconds since 1970; 0: not known. Another time is another node.
    pub since: i64,
    /// No certificate from before counts, in seconds since 1970; 0: all do.
    pub certified_since: i64,
}

impl Peer {
    /// Where its daemon is, for people.
    pub fn shown(&self) -> String {
        let (host, port) = &self.control;
        match host.parse::<IpAddr>() {
            Ok(ip) => SocketAddr::new(ip, *port).to_string(),
            Err(_) => format!("{host}:{port}"),
        }
    }
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Error {
    #[error("[[peer]] needs the name of this node: set `name` in [node]")]
    NoName,
    #[error("node name `{0}`: use lower-case letters, digits, `-` and `.`, as in a DNS name")]
    Name(String),
    #[error("[[peer]] `{0}` is this node itself: its addresses belong under [node]")]
    Own(String),
    #[error("[[peer]] `{0}` stands there twice")]
    Twice(String),
    #[error("node `{node}`: `{text}` is no address range: {why}")]
    Range {
        node: String,
        text: String,
        why: RangeError,
    },
    #[error("node `{0}` has no addresses: nothing could be paired with it")]
    NoAddresses(String),
    #[error("address range {0} of node `{1}` overlaps {2} of node `{3}`: each address belongs to one node")]
    Overlap(Range, String, Range, String),
    #[error("node `{0}`: control address `{1}` is not `address:port`")]
    Control(String, String),
}

#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum RangeError {
    #[error("write it as 10.0.0.0/24 or fd00::/64")]
    Form,
    #[error("the prefix is longer than the address")]
    Prefix,
    #[error("bits after the prefix are set; did you mean {0}?")]
    HostBits(Range),
}

/// Addresses with a common prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    ip: IpAddr,
    len: u8,
}

/// An address as bits at the top of 128, so that prefixes of both kinds compare alike.
fn bits(ip: IpAddr) -> u128 {
    match ip {
        IpAddr::V4(a) => u128::from(u32::from(a)) << 96,
        IpAddr::V6(a) => u128::from(a),
    }
}

fn mask(len: u8) -> u128 {
    match len {
        0 => 0,
        n => u128::MAX << (128 - u32::from(n.min(128))),
    }
}

impl Range {
    pub fn contains(&self, ip: IpAddr) -> bool {
        let ip = ip.to_canonical();
        ip.is_ipv4() == self.ip.is_ipv4() && (bits(ip) ^ bits(self.ip)) & mask(self.len) == 0
    }

    pub fn overlaps(&self, other: &Range) -> bool {
        let len = self.len.min(other.len);
        self.ip.is_ipv4() == other.ip.is_ipv4() && (bits(self.ip) ^ bits(other.ip)) & mask(len) == 0
    }
}

impl FromStr for Range {
    type Err = RangeError;

    fn from_str(s: &str) -> Result<Range, RangeError> {
        let (ip, len) = match s.split_once('/') {
            Some((ip, len)) => (ip, Some(len)),
            None => (s, None),
        };
        let ip: IpAddr = ip.parse().map_err(|_| RangeError::Form)?;
        let most = if ip.is_ipv4() { 32 } else { 128 };
        let len = match len {
            None => most,
            // `parse` would take a sign.
            Some(t) if !t.is_empty() && t.bytes().all(|b| b.is_ascii_digit()) => {
                t.parse().map_err(|_| RangeError::Prefix)?
            }
            Some(_) => return Err(RangeError::Form),
        };
        if len > most {
            return Err(RangeError::Prefix);
        }
        let cut = bits(ip) & mask(len);
        if cut != bits(ip) {
            let ip = match ip {
                IpAddr::V4(_) => Ipv4Addr::from((cut >> 96) as u32).into(),
                IpAddr::V6(_) => Ipv6Addr::from(cut).into(),
            };
            return Err(RangeError::HostBits(Range { ip, len }));
        }
        Ok(Range { ip, len })
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.ip, self.len)
    }
}

/// Host and port of a control address.
pub fn control(text: &str) -> Option<(String, u16)> {
    if let Ok(a) = text.parse::<SocketAddr>() {
        return Some((a.ip().to_string(), a.port()));
    }
    let bare = text.trim_start_matches('[').trim_end_matches(']');
    if let Ok(a) = bare.parse::<IpAddr>() {
        return Some((a.to_string(), PORT));
    }
    let (host, port) = match text.split_once(':') {
        Some((h, p)) => (h, p.parse().ok().filter(|p| *p != 0)?),
        None => (text, PORT),
    };
    valid_name(&host.to_ascii_lowercase()).then(|| (host.to_owned(), port))
}

/// What the configuration file says about one node.
pub struct Listed<'a> {
    pub name: &'a str,
    pub control: &'a str,
    pub addresses: &'a [String],
}

/// The directory of the configuration file.
#[derive(Debug)]
pub struct FileDirectory {
    own: Name,
    peers: HashMap<Name, Peer>,
    /// `None` as the owner: this node.
    ranges: Vec<(Range, Option<Name>)>,
}

fn ranges(node: &str, list: &[String]) -> Result<Vec<Range>, Error> {
    let parse = |text: &String| {
        text.parse().map_err(|why| Error::Range {
            node: node.into(),
            text: text.clone(),
            why,
        })
    };
    list.iter().map(parse).collect()
}

impl FileDirectory {
    /// Checks all entries: what is accepted has no contradictions.
    pub fn new(own: &str, own_addresses: &[String], listed: &[Listed<'_>]) -> Result<Self, Error> {
        if own.is_empty() {
            return Err(Error::NoName);
        }
        if !valid_name(own) {
            return Err(Error::Name(own.into()));
        }
        let own: Name = own.into();
        let mut all: Vec<(Range, Option<Name>)> = ranges(&own, own_addresses)?
            .into_iter()
            .map(|r| (r, None))
            .collect();
        let mut peers = HashMap::new();
        for l in listed {
            if !valid_name(l.name) {
                return Err(Error::Name(l.name.into()));
            }
            if l.name == &*own {
                return Err(Error::Own(l.name.into()));
            }
            let name: Name = l.name.into();
            let control = control(l.control)
                .ok_or_else(|| Error::Control(l.name.into(), l.control.into()))?;
            let peer = Peer {
                name: name.clone(),
                control,
                since: 0,
                certified_since: 0,
            };
            if peers.insert(name.clone(), peer).is_some() {
                return Err(Error::Twice(l.name.into()));
            }
            if l.addresses.is_empty() {
                return Err(Error::NoAddresses(l.name.into()));
            }
            let theirs = ranges(l.name, l.addresses)?;
            all.extend(theirs.into_iter().map(|r| (r, Some(name.clone()))));
        }
        for (i, (a, x)) in all.iter().enumerate() {
            for (b, y) in &all[i + 1..] {
                if x != y && a.overlaps(b) {
                    let say = |n: &Option<Name>| n.as_ref().unwrap_or(&own).to_string();
                    return Err(Error::Overlap(*a, say(x), *b, say(y)));
                }
            }
        }
        Ok(FileDirectory {
            own,
            peers,
            ranges: all,
        })
    }
}

impl Directory for FileDirectory {
    fn own(&self) -> &Name {
        &self.own
    }

    fn find(&self, node: &str) -> Option<Peer> {
        self.peers.get(node).cloned()
    }

    fn peers(&self) -> Vec<Peer> {
        let mut all: Vec<Peer> = self.peers.values().cloned().collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }

    fn owner(&self, ip: IpAddr) -> Owner {
        let ip = ip.to_canonical();
        if is_own(ip) {
            return Owner::Own;
        }
        match self.ranges.iter().find(|(r, _)| r.contains(ip)) {
            Some((_, None)) => Owner::Own,
            Some((_, Some(n))) => Owner::Peer(n.clone()),
            None => Owner::Nobody,
        }
    }
}

/// Names of a certificate that are peers.
pub fn peers_among(directory: &dyn Directory, names: &[String]) -> HashSet<Name> {
    let found = names.iter().filter_map(|n| directory.find(n));
    found.map(|p| p.name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn dir(own: &[&str], peers: &[(&str, &str, &[&str])]) -> Result<FileDirectory, String> {
        let strings = |l: &[&str]| l.iter().map(|s| s.to_string()).collect::<Vec<_>>();
        let kept: Vec<_> = peers.iter().map(|p| (p.0, p.1, strings(p.2))).collect();
        let listed: Vec<_> = kept
            .iter()
            .map(|(name, control, addresses)| Listed {
                name,
                control,
                addresses,
            })
            .collect();
        FileDirectory::new("a", &strings(own), &listed).map_err(|e| e.to_string())
    }

    #[test]
    fn owners() {
        let d = dir(
            &["10.1.0.0/16", "fd01::/32"],
            &[
                ("b", "192.0.2.2", &["10.2.0.0/16", "192.0.2.2"]),
                ("c", "[fd03::1]:99", &["fd03::/32"]),
            ],
        )
        .unwrap();
        let who = |s: &str| d.owner(s.parse().unwrap());
        let b = Owner::Peer("b".into());
        assert_eq!(who("10.1.2.3"), Owner::Own);
        assert_eq!(who("fd01::9"), Owner::Own);
        assert_eq!(who("127.0.0.9"), Owner::Own);
        assert_eq!(who("::1"), Owner::Own);
        assert_eq!(who("10.2.255.255"), b);
        assert_eq!(who("::ffff:10.2.0.1"), b);
        assert_eq!(who("192.0.2.2"), b);
        assert_eq!(who("192.0.2.3"), Owner::Nobody);
        assert_eq!(who("fd03:0:1::"), Owner::Peer("c".into()));
        assert_eq!(who("fd04::"), Owner::Nobody);
        assert_eq!(d.peers()[0].control, ("192.0.2.2".into(), PORT));
        assert_eq!(d.peers()[1].control, ("fd03::1".into(), 99));
        assert!(d.find("a").is_none() && d.find("c").is_some());
    }

    #[test]
    fn mistakes_have_names() {
        let e = |own: &[&str], peers: &[(&str, &str, &[&str])]| dir(own, peers).unwrap_err();
        let h = "h:1";
        assert!(e(&[], &[("a", h, &["10.0.0.1"])]).contains("`a` is this node itself"));
        assert!(e(&[], &[("b", h, &["10.0.0.1"]), ("b", h, &["10.0.0.2"])]).contains("twice"));
        assert!(e(&[], &[("b", h, &["10.0.0.1/24"])]).contains("did you mean 10.0.0.0/24"));
        assert!(e(&[], &[("b", h, &["10.0.0.0/33"])]).contains("prefix is longer"));
        assert!(e(&[], &[("b", h, &["10.0.0.0/+8"])]).contains("no address range"));
        assert!(e(&[], &[("b", h, &["ten"])]).contains("`ten`"));
        assert!(e(&[], &[("b", h, &[])]).contains("no addresses"));
        assert!(e(&[], &[("B", h, &["10.0.0.1"])]).contains("node name `B`"));
        assert!(e(&[], &[("b", "h:0", &["10.0.0.1"])]).contains("control address `h:0`"));
        assert!(e(&[], &[("b", "h:x", &["10.0.0.1"])]).contains("control address"));
        let o = e(&["10.0.0.0/8"], &[("b", h, &["10.9.0.0/16"])]);
        assert_eq!(o, "address range 10.0.0.0/8 of node `a` overlaps 10.9.0.0/16 of node `b`: each address belongs to one node");
        assert!(e(&[], &[("b", h, &["::/0"]), ("c", h, &["fd00::1"])]).contains("overlaps"));
        // Inside one node ranges may overlap, and the two families never do.
        assert!(dir(&["10.0.0.0/8", "10.0.0.1"], &[("b", h, &["::/0"])]).is_ok());
        assert_eq!(FileDirectory::new("", &[], &[]).unwrap_err(), Error::NoName);
    }

    #[test]
    fn names() {
        for good in ["a", "node-1.example", "0a", "n1.rack2"] {
            assert!(valid_name(good), "{good}");
        }
        for bad in [
            "", ".", "a..b", "-a", "a-", "A", "a_b", "10.0.0.1", "a b", "ä",
        ] {
            assert!(!valid_name(bad), "{bad}");
        }
        assert!(!valid_name(&"a.".repeat(130)));
    }

    proptest! {
        #[test]
        fn a_range_contains_what_it_says(ip: u32, len in 0u8..=32, other: u32) {
            let cut = if len == 0 { 0 } else { ip & (u32::MAX << (32 - u32::from(len))) };
            let r: Range = format!("{}/{len}", Ipv4Addr::from(cut)).parse().unwrap();
            prop_assert!(r.contains(Ipv4Addr::from(ip).into()));
            let same = len == 0 || (ip ^ other) >> (32 - u32::from(len)) == 0;
            prop_assert_eq!(r.contains(Ipv4Addr::from(other).into()), same);
            prop_assert_eq!(r.to_string().parse::<Range>().unwrap(), r);
        }

        #[test]
        fn noise_is_refused_without_panic(s in "\\PC{0,40}") {
            let _ = s.parse::<Range>();
            let _ = control(&s);
            let _ = valid_name(&s);
        }
    }
}
