//! Connections at the port between nodes that have not said who they are.
//!
//! Those from where daemons of other nodes are have places of their own, so that nobody else keeps nodes from each other. If
//! there is no place, the oldest connection of the address that has most makes way; and one that comes too soon after others is
//! refused, so that each has some time.

use crate::clients::places::{Place, Places};
use crate::nodes::peers::directory::Directory;
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, Ipv6Addr};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Places at the addresses of nodes, and at all others.
const PLACES: usize = 256;
/// So often one is given to an address of a node, or to all others together, and so many at once. (Handshakes take time on the
/// thread that serves everybody.)
const BETWEEN: Duration = Duration::from_millis(5);
const AT_ONCE: u32 = 16;
/// Addresses that are remembered before those are forgotten that do not matter any more.
const PACES: usize = 1024;

pub(super) struct Unnamed {
    /// Where daemons of other nodes are, and of which generation of the directory.
    at: RefCell<(Option<u64>, HashSet<IpAddr>)>,
    nodes: Rc<Places>,
    others: Rc<Places>,
    /// When the next one may come, if they come one after the other. `None`: not from a node.
    paces: RefCell<HashMap<Option<IpAddr>, Instant>>,
}

/// Who one is that is no node: of an IPv6 address, the network, because it has as many addresses as it likes.
fn network(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V4(_) => ip,
        IpAddr::V6(a) => Ipv6Addr::from_bits(a.to_bits() >> 64 << 64).into(),
    }
}

impl Unnamed {
    pub(super) fn new() -> Unnamed {
        Unnamed {
            at: RefCell::default(),
            nodes: Places::new(PLACES),
            others: Places::new(PLACES),
            paces: RefCell::default(),
        }
    }

    /// A connection has come from this address; and does another one make way for it? `None`: it came too soon.
    pub(super) fn enter(&self, ip: IpAddr, directory: &dyn Directory) -> Option<(Place, bool)> {
        let (places, pace, ip) = match self.is_a_nodes(ip, directory) {
            true => (&self.nodes, Some(ip), ip),
            false => (&self.others, None, network(ip)),
        };
        self.in_time(pace, Instant::now())
            .then(|| places.enter(&ip.to_string()))
    }

    fn is_a_nodes(&self, ip: IpAddr, directory: &dyn Directory) -> bool {
        let (of, all) = &mut *self.at.borrow_mut();
        let generation = Some(directory.generation());
        if *of != generation {
            let hosts = directory.peers().into_iter();
            let hosts = hosts.filter_map(|p| p.control.0.parse::<IpAddr>().ok());
            *all = hosts.map(|a| a.to_canonical()).collect();
            *of = generation;
        }
        all.contains(&ip)
    }

    fn in_time(&self, of: Option<IpAddr>, now: Instant) -> bool {
        let mut paces = self.paces.borrow_mut();
        if paces.len() >= PACES {
            paces.retain(|_, next| *next > now);
        }
        let next = paces.entry(of).or_insert(now);
        let may = *next < now + BETWEEN * AT_ONCE;
        if may {
            *next = now.max(*next) + BETWEEN;
        }
        may
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nodes::peers::directory::{FileDirectory, Listed};
    use std::future::Future;

    fn leaves(p: &Place) -> bool {
        let mut told = std::pin::pin!(p.has_to_leave());
        let mut nobody = std::task::Context::from_waker(std::task::Waker::noop());
        told.as_mut().poll(&mut nobody).is_ready()
    }

    /// Those who keep connections, from one address or from many, keep no node out; nor do they from the node's own.
    #[test]
    fn nodes_have_their_places() {
        let addresses = ["10.2.0.0/16".to_owned()];
        let listed = [Listed {
            name: "b",
            control: "192.0.2.1:7471",
            addresses: &addresses,
        }];
        let directory = FileDirectory::new("a", &["10.1.0.0/16".to_owned()], &listed).unwrap();
        let all = Unnamed::new();
        let come = |ip: String| {
            all.paces.borrow_mut().clear(); // time has passed
            all.enter(ip.parse().unwrap(), &directory).unwrap()
        };
        let many: Vec<_> = (0..2 * PLACES)
            .map(|n| come(format!("198.51.{}.{}", n / 256, n % 256)).0)
            .collect();
        assert_eq!(many.iter().filter(|p| leaves(p)).count(), PLACES);
        let (node, full) = come("192.0.2.1".into());
        assert!(!full);
        let one: Vec<_> = (0..PLACES).map(|_| come("203.0.113.1".into()).0).collect();
        assert!(!leaves(&node));
        let (other, full) = come("203.0.113.2".into());
        assert!(full && !leaves(&other) && leaves(&one[0]));
        let same: Vec<_> = (0..PLACES - 1)
            .map(|_| come("192.0.2.1".into()).0)
            .collect();
        assert!(!leaves(&node));
        drop(same);
        // All addresses of a network are one.
        assert_eq!(
            network("fd00::1:2:3:4".parse().unwrap()),
            network("fd00::".parse::<IpAddr>().unwrap())
        );
    }

    #[test]
    fn who_comes_too_often_is_refused() {
        let all = Unnamed::new();
        let now = Instant::now();
        let node = Some(IpAddr::from([192, 0, 2, 1]));
        let count = |of, at| (0..100).filter(|_| all.in_time(of, at)).count();
        assert_eq!(count(None, now), AT_ONCE as usize);
        assert_eq!(count(node, now), AT_ONCE as usize);
        assert_eq!(count(None, now + 2 * BETWEEN), 2);
        for n in 0..2 * PACES {
            let ip = IpAddr::from(Ipv6Addr::from_bits(n as u128));
            all.in_time(Some(ip), now + Duration::from_secs(n as u64));
        }
        assert!(all.paces.borrow().len() <= PACES);
    }
}
