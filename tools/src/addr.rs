//! Endpoints as people write and read them.

use std::net::{IpAddr, SocketAddr};

/// Parses `ip:port`. IPv6 may be in brackets or, as `smcss` prints it, without.
pub fn parse(s: &str) -> Result<SocketAddr, String> {
    if s.contains("..:") {
        return Err(format!(
            "`{s}` is a shortened address; `underpass ss -W` shows it whole"
        ));
    }
    let (ip, port) = s
        .rsplit_once(':')
        .ok_or_else(|| format!("`{s}` has no port: ADDRESS:PORT is needed"))?;
    let port: u16 = port
        .parse()
        .map_err(|_| format!("`{port}` is not a port number"))?;
    let ip = ip
        .strip_prefix('[')
        .and_then(|i| i.strip_suffix(']'))
        .unwrap_or(ip);
    let ip: IpAddr = ip
        .parse()
        .map_err(|_| format!("`{ip}` is not an IP address"))?;
    Ok(SocketAddr::new(ip.to_canonical(), port))
}

/// Checks an endpoint with [`parse`] and returns it in the daemon's notation.
pub fn argument(s: &str) -> Result<String, String> {
    parse(s).map(|a| a.to_string())
}

/// The form and width of `smcss`: no brackets, and not longer than `short` unless `wide` is set. Text that is not an
/// endpoint is returned as it is.
pub fn smcss(s: &str, short: usize, wide: bool) -> String {
    let Ok(a) = parse(s) else { return s.to_owned() };
    let (ip, port) = (a.ip().to_string(), a.port().to_string());
    if wide || ip.len() + 1 + port.len() <= short {
        format!("{ip}:{port}")
    } else {
        format!("{}..:{port}", &ip[..short - 3 - port.len()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_notation_is_read() {
        for (s, want) in [
            ("127.0.0.1:80", "127.0.0.1:80"),
            ("[::1]:80", "[::1]:80"),
            ("::1:80", "[::1]:80"),
            ("::ffff:10.0.0.1:80", "10.0.0.1:80"),
            ("[fd00::2]:65535", "[fd00::2]:65535"),
        ] {
            assert_eq!(argument(s).as_deref(), Ok(want), "{s}");
        }
        for s in [
            "",
            "1.2.3.4",
            "1.2.3.4:",
            "1.2.3.4:65536",
            "1.2.3:80",
            "host:80",
            "[::1:80",
            "2001:db8:0:1..:80",
        ] {
            assert!(argument(s).is_err(), "{s}");
        }
    }

    #[test]
    fn long_addresses_are_cut_to_the_column() {
        let a = "[2001:db8:1111:2222:3333:4444:5555:6666]:443";
        assert_eq!(smcss(a, 23, false), "2001:db8:1111:222..:443");
        assert_eq!(smcss(a, 23, false).len(), 23);
        assert_eq!(
            smcss(a, 23, true),
            "2001:db8:1111:2222:3333:4444:5555:6666:443"
        );
        assert_eq!(smcss("[fd00::1]:8080", 23, false), "fd00::1:8080");
        assert_eq!(
            smcss("255.255.255.255:65535", 23, false),
            "255.255.255.255:65535"
        );
        assert_eq!(smcss("*", 23, false), "*");
    }
}
