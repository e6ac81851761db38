//! Addresses of sockets, in a form that can be compared.

use std::net::{IpAddr, SocketAddr, SocketAddrV6};

/// Local and peer address.
pub(crate) type Pair = (SocketAddr, SocketAddr);

/// One form for equal addresses: IPv4-mapped becomes IPv4, flow labels go, the scope stays only
/// where it means something.
pub(crate) fn normal(a: SocketAddr) -> SocketAddr {
    match a {
        SocketAddr::V4(_) => a,
        SocketAddr::V6(v6) => match v6.ip().to_ipv4_mapped() {
            Some(v4) => SocketAddr::new(IpAddr::V4(v4), v6.port()),
            None => {
                let scope = if v6.ip().is_unicast_link_local() {
                    v6.scope_id()
                } else {
                    0
                };
                SocketAddr::V6(SocketAddrV6::new(*v6.ip(), v6.port(), 0, scope))
            }
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_form_of_addresses() {
        let n = |s: &str| normal(s.parse().unwrap());
        assert_eq!(n("[::ffff:10.0.0.1]:80"), "10.0.0.1:80".parse().unwrap());
        assert_eq!(n("[2001:db8::1%3]:80"), "[2001:db8::1]:80".parse().unwrap());
        assert_eq!(n("[fe80::1%3]:80"), "[fe80::1%3]:80".parse().unwrap());
    }
}
