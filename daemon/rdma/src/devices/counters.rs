//! The counters of ports, as the kernel shows them in sysfs, under the names that Prometheus's node_exporter gives them:
//! what was written for it works with these, too.
//!
//! All ports of all devices, also of those that no rail uses, and of devices that are shared with containers.

use super::sysfs::{leading_number, names, text, Tree};
use std::path::Path;

/// A port and what its device has counted. (Which counters there are depends on the driver.)
#[derive(Clone, Debug, PartialEq)]
pub struct PortCounters {
    /// Name of the device.
    pub device: String,
    /// From 1.
    pub port: u8,
    /// 0: no change, 1: down, 2: init, 3: armed, 4: active, 5: active, deferred.
    pub state: Option<u32>,
    /// 1: sleep, 2: polling, 3: disabled, 4: training, 5: up, 6: recovers from an error, 7: test.
    pub physical_state: Option<u32>,
    /// Of its wire, in bytes per second, as the driver says.
    pub rate: Option<f64>,
    /// Those of [`NAMED`] that the port has, by their name there.
    pub named: Vec<(&'static str, u64)>,
    /// The driver's own counters that have no name there, by the name of their file.
    pub own: Vec<(String, u64)>,
}

/// Directory and file, name for node_exporter without `node_infiniband_` and `_total`, factor (data is counted in words of
/// four bytes), and meaning.
pub const NAMED: &[(&str, &str, &str, u64, &str)] = &[
    (
        "counters",
        "port_rcv_data",
        "port_data_received_bytes",
        4,
        "Bytes received on all lanes of the link",
    ),
    (
        "counters",
        "port_xmit_data",
        "port_data_transmitted_bytes",
        4,
        "Bytes sent on all lanes of the link",
    ),
    (
        "counters",
        "port_rcv_packets",
        "port_packets_received",
        1,
        "Packets received, errors included",
    ),
    (
        "counters",
        "port_xmit_packets",
        "port_packets_transmitted",
        1,
        "Packets sent, errors included",
    ),
    (
        "counters",
        "unicast_rcv_packets",
        "unicast_packets_received",
        1,
        "Unicast packets received",
    ),
    (
        "counters",
        "unicast_xmit_packets",
        "unicast_packets_transmitted",
        1,
        "Unicast packets sent",
    ),
    (
        "counters",
        "multicast_rcv_packets",
        "multicast_packets_received",
        1,
        "Multicast packets received",
    ),
    (
        "counters",
        "multicast_xmit_packets",
        "multicast_packets_transmitted",
        1,
        "Multicast packets sent",
    ),
    (
        "counters",
        "port_rcv_errors",
        "port_errors_received",
        1,
        "Packets received with an error",
    ),
    (
        "counters",
        "port_rcv_discards",
        "port_discards_received",
        1,
        "Packets received and discarded",
    ),
    (
        "counters",
        "port_xmit_discards",
        "port_discards_transmitted",
        1,
        "Packets discarded instead of sent",
    ),
    (
        "counters",
        "port_rcv_constraint_errors",
        "port_constraint_errors_received",
        1,
        "Packets received and discarded by the port's rules",
    ),
    (
        "counters",
        "port_xmit_constraint_errors",
        "port_constraint_errors_transmitted",
        1,
        "Packets not sent by the port's rules",
    ),
    (
        "counters",
        "port_xmit_wait",
        "port_transmit_wait",
        1,
        "Ticks in which there was data and nothing was sent",
    ),
    (
        "counters",
        "port_rcv_remote_physical_errors",
        "port_receive_remote_physical_errors",
        1,
        "Packets received that were marked as bad on the way",
    ),
    (
        "counters",
        "port_rcv_switch_relay_errors",
        "port_receive_switch_relay_errors",
        1,
        "Packets that could not be forwarded",
    ),
    (
        "counters",
        "symbol_error",
        "symbol_error",
        1,
        "Errors on the physical lanes of the link",
    ),
    (
        "counters",
        "link_downed",
        "link_downed",
        1,
        "Times that the link did not recover from an error",
    ),
    (
        "counters",
        "link_error_recovery",
        "link_error_recovery",
        1,
        "Times that the link recovered from an error",
    ),
    (
        "counters",
        "VL15_dropped",
        "vl15_dropped",
        1,
        "Management packets dropped for want of space",
    ),
    (
        "hw_counters",
        "duplicate_request",
        "duplicate_requests_packets",
        1,
        "Requests received twice",
    ),
    (
        "hw_counters",
        "implied_nak_seq_err",
        "implied_nak_seq_errors",
        1,
        "Acknowledgements that imply a lost one",
    ),
    (
        "hw_counters",
        "local_ack_timeout_err",
        "local_ack_timeout_errors",
        1,
        "Acknowledgements that did not come in time",
    ),
    (
        "hw_counters",
        "np_cnp_sent",
        "np_cnp_packets_sent",
        1,
        "Congestion notifications sent",
    ),
    (
        "hw_counters",
        "np_ecn_marked_roce_packets",
        "np_ecn_marked_roce_packets_received",
        1,
        "Packets received that a switch marked as congested",
    ),
    (
        "hw_counters",
        "out_of_buffer",
        "out_of_buffer_drops",
        1,
        "Packets dropped because no receive was posted",
    ),
    (
        "hw_counters",
        "out_of_sequence",
        "out_of_sequence_packets_received",
        1,
        "Packets received out of sequence",
    ),
    (
        "hw_counters",
        "packet_seq_err",
        "packet_sequence_errors",
        1,
        "Sequence errors that the other end reported",
    ),
    (
        "hw_counters",
        "rnr_nak_retry_err",
        "rnr_nak_retry_packets_received",
        1,
        "Answers that the receiver was not ready",
    ),
    (
        "hw_counters",
        "rp_cnp_handled",
        "rp_cnp_packets_handled",
        1,
        "Congestion notifications obeyed",
    ),
    (
        "hw_counters",
        "rp_cnp_ignored",
        "rp_cnp_ignored_packets_received",
        1,
        "Congestion notifications ignored",
    ),
    (
        "hw_counters",
        "rx_icrc_encapsulated",
        "rx_icrc_encapsulated_errors",
        1,
        "RoCE packets with a wrong checksum",
    ),
    (
        "hw_counters",
        "rx_read_requests",
        "rx_read_requests",
        1,
        "RDMA reads received",
    ),
    (
        "hw_counters",
        "rx_write_requests",
        "rx_write_requests",
        1,
        "RDMA writes received",
    ),
];

/// Counters of its own that are taken from one driver.
const OWN_MAX: usize = 128;

fn number(file: &Path) -> Option<u64> {
    text(file)?.parse().ok()
}

/// `100 Gb/sec (4X EDR)`, in bytes per second.
fn rate(said: &str) -> Option<f64> {
    let (number, unit) = said.split_once(' ')?;
    unit.starts_with("Gb/sec")
        .then(|| number.parse::<f64>().ok().map(|n| n * 1e9 / 8.0))?
}

impl Tree {
    /// What all ports have counted.
    pub fn counters(&self) -> Vec<PortCounters> {
        let mut all = Vec::new();
        for device in self.names() {
            let ports = self.class.join(&device).join("ports");
            for port in names(&ports) {
                let Ok(number) = port.parse() else { continue };
                all.push(port_counters(&device, number, &ports.join(&port)));
            }
        }
        all
    }
}

fn port_counters(device: &str, port: u8, dir: &Path) -> PortCounters {
    let state = |file| text(&dir.join(file)).and_then(|t| leading_number(&t));
    let named = NAMED.iter().filter_map(|(at, file, name, factor, _)| {
        let n = number(&dir.join(at).join(file))?;
        Some((*name, n.wrapping_mul(*factor)))
    });
    let own = dir.join("hw_counters");
    let has_name = |f: &String| NAMED.iter().any(|n| n.0 == "hw_counters" && n.1 == f);
    let own = names(&own)
        .into_iter()
        .filter(|f| f != "lifespan" && !has_name(f))
        .take(OWN_MAX)
        .filter_map(|f| Some((f.clone(), number(&own.join(f))?)));
    PortCounters {
        device: device.to_owned(),
        port,
        state: state("state"),
        physical_state: state("phys_state"),
        rate: text(&dir.join("rate")).and_then(|t| rate(&t)),
        named: named.collect(),
        own: own.collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn what_sysfs_says_under_the_exporters_names() {
        let t = tempfile::tempdir().unwrap();
        let port = t.path().join("class/infiniband/mlx5_0/ports/1");
        for (file, text) in [
            ("state", "4: ACTIVE"),
            ("phys_state", "5: LinkUp"),
            ("rate", "100 Gb/sec (4X EDR)"),
            ("counters/port_rcv_data", "25"),
            ("counters/port_xmit_wait", "N/A (no PMA)"),
            ("hw_counters/out_of_sequence", "3"),
            ("hw_counters/sent_pkts", "7"),
            ("hw_counters/lifespan", "10"),
        ] {
            let at = port.join(file);
            fs::create_dir_all(at.parent().unwrap()).unwrap();
            fs::write(at, format!("{text}\n")).unwrap();
        }
        let all = Tree::at(t.path()).counters();
        let expected = PortCounters {
            device: "mlx5_0".into(),
            port: 1,
            state: Some(4),
            physical_state: Some(5),
            rate: Some(12.5e9),
            named: vec![
                ("port_data_received_bytes", 100),
                ("out_of_sequence_packets_received", 3),
            ],
            own: vec![("sent_pkts".into(), 7)],
        };
        assert_eq!(all, [expected]);
    }
}
