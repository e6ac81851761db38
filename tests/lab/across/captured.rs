//! `underpass capture` of a lane between nodes, on both nodes at once: each daemon shows what its end sends and receives.

use anyhow::{ensure, Context, Result};
use std::path::PathBuf;
use underpass_tests::harness::tshark::{compare, followed, hash_of_last, packets, Load};
use underpass_tests::harness::{paths, until};
use underpass_tests::lab::cluster::Cluster;
use underpass_tests::lab::streams::{CLIENT, SERVER};
use underpass_tests::lab::{quoted, Lab, Running, PATIENCE};

const GATE: &str = "/run/captured-gate";
/// Neither root nor the user of the programs.
const STRANGER: u32 = 12346;
const OWNER: u32 = 12345;

/// A connection between the nodes, on its lane, whose client waits before it goes on.
struct Talk {
    client: Running,
    server: Running,
    /// Its address at the client and at the server.
    addresses: [String; 2],
    port: u16,
}

impl Talk {
    fn start(lab: &Lab, c: &Cluster, load: &Load) -> Result<Talk> {
        let program = |n: usize, words: String| {
            lab.node(n).check(format!("rm -f {GATE}"))?;
            let script = format!(
                "exec setpriv --reuid {OWNER} --clear-groups {} -u {} {words}",
                paths::PYTHON,
                quoted(&paths::script("captured.py").to_string_lossy())
            );
            let job = lab.node(n).sh(script)?;
            job.envs(c.eager()[n].clone()).spawn()
        };
        let host = lab.node(SERVER).host();
        let host = host.to_string();
        let server = program(SERVER, load.serve(&host, GATE) + " apart")?;
        let port = server.line("port ")?;
        let client = load.connect(&host, &port, GATE) + " apart";
        let client = program(CLIENT, client)?;
        let port: u16 = port.parse()?;
        let local = client.line("local ")?;
        c.await_smcr(port, 1)?;
        Ok(Talk {
            client,
            server,
            addresses: [
                format!("{}:{local}", lab.node(CLIENT).host()),
                format!("{host}:{port}"),
            ],
            port,
        })
    }

    /// The command, as it is given at a node.
    fn tool(&self, n: usize, more: &str) -> String {
        let [client, server] = &self.addresses;
        let (local, peer) = match n == CLIENT {
            true => (client, server),
            false => (server, client),
        };
        let tool = quoted(&paths::bin("underpass").to_string_lossy());
        format!("{tool} capture {local} {peer} {more}")
    }

    /// Begins a capture at a node, and returns when it sees both directions.
    fn capture(&self, lab: &Lab, c: &Cluster, n: usize) -> Result<Running> {
        let script = format!("exec {}", self.tool(n, "-w /run/lane.pcapng"));
        let tool = lab.node(n).sh(script)?.envs(dir(c, n)).spawn()?;
        until("both directions are captured", PATIENCE, || {
            tool.stderr().contains("SMCR in both directions")
        })
        .with_context(|| format!("{}\n{}", tool.stderr(), c.picture()))?;
        Ok(tool)
    }

    /// Goes on to its end, and is captured at both nodes; so many bytes at least go over rails. The captures, and what both
    /// ends say that they have sent: hashes.
    fn captured(self, lab: &Lab, c: &Cluster, bytes: usize) -> Result<([Running; 2], [String; 2])> {
        let tools = [self.capture(lab, c, 0)?, self.capture(lab, c, 1)?];
        c.await_smcr(self.port, 1)?;
        let before = c.carried()?;
        let hashes = self.finish(lab)?;
        c.has_carried(before, bytes as u64)?;
        Ok((tools, hashes))
    }

    /// Goes on to its end. What the client and the server say that they have sent: hashes.
    fn finish(self, lab: &Lab) -> Result<[String; 2]> {
        lab.node(CLIENT).check(format!("touch {GATE}"))?;
        let hash = |running: Running| -> Result<String> {
            let out = running.wait()?.ok()?;
            let hash = out.lines().find_map(|l| l.strip_prefix("sent "));
            anyhow::Ok(hash.with_context(|| out.clone())?.to_owned())
        };
        Ok([hash(self.client)?, hash(self.server)?])
    }
}

/// The environment without the library: what the tool needs.
fn dir(c: &Cluster, n: usize) -> Vec<(String, String)> {
    let mut env = c.shim()[n].clone();
    env.retain(|(name, _)| name != "LD_PRELOAD");
    env
}

/// The file that a capture has written in a machine, on the host.
fn fetch(lab: &Lab, n: usize, to: &tempfile::TempDir) -> Result<PathBuf> {
    let bytes = lab.node(n).guest()?.read("/run/lane.pcapng")?;
    let path = to.path().join(format!("{n}.pcapng"));
    std::fs::write(&path, bytes)?;
    Ok(path)
}

/// Whoever owns the end of a node may, on that node; nobody else but root.
fn who_may(lab: &Lab, c: &Cluster, t: &Talk) -> Result<()> {
    for n in [SERVER, CLIENT] {
        for (uid, may) in [(OWNER, true), (STRANGER, false)] {
            let script = format!(
                "exec setpriv --reuid {uid} --clear-groups {} | wc -c",
                t.tool(n, "-w - -n 100")
            );
            let out = lab.node(n).sh(script)?.envs(dir(c, n)).spawn()?.wait()?;
            let bytes: usize = out.stdout.trim().parse().unwrap_or(0);
            ensure!((bytes > 100) == may, "{uid} on node {n}: {out:?}");
            let refused = out.stderr.contains("must be yours");
            ensure!(refused != may, "{uid} on node {n}: {out:?}");
        }
    }
    Ok(())
}

/// At each node tshark reassembles what both ends have sent; the sequence numbers are the connection's own, so both nodes
/// have the same ones.
pub fn a_capture_on_either_node(lab: &mut Lab) -> Result<()> {
    let c = Cluster::start(lab)?;
    let load = Load {
        rounds: 120,
        chunk: 4 << 10,
        reply: 1000,
        pause_ms: 5,
    };
    let t = Talk::start(lab, &c, &load)?;
    who_may(lab, &c, &t)?;
    let addresses = t.addresses.clone();
    let sizes = [load.rounds * load.chunk, load.rounds * load.reply];
    let (tools, hashes) = t.captured(lab, &c, sizes[0] + sizes[1])?;
    let dir = tempfile::tempdir()?;
    let mut firsts = Vec::new();
    for (n, tool) in tools.into_iter().enumerate() {
        let said = tool.wait()?;
        let whole = said.stderr.contains("no gaps") && said.stderr.contains("has ended");
        ensure!(whole, "{said:?}");
        let file = fetch(lab, n, &dir)?;
        let all = packets(&file)?;
        for (end, address) in addresses.iter().enumerate() {
            let port = address.rsplit(':').next().context("port")?;
            compare(&all, port, true)?;
            let streams = followed(&file, port)?;
            let seen = hash_of_last(&streams[0], sizes[end])?;
            ensure!(
                seen == hashes[end],
                "node {n}, end {end}: {seen} {hashes:?}"
            );
            let p = all.iter().find(|p| p.from == port).context("packets")?;
            let at = u64::from_ne_bytes(p.bytes[..8].try_into()?) * 8;
            firsts.push((end, p.seq.wrapping_sub(at as u32)));
        }
    }
    ensure!(
        firsts[..2] == firsts[2..] && firsts.iter().all(|f| f.1 > 1),
        "{firsts:?}"
    );
    c.no_resets()
}

/// Large pieces, written by devices over the places of earlier ones: the node that receives them misses nothing, and at
/// neither node is there a wrong byte.
pub fn a_capture_of_much(lab: &mut Lab) -> Result<()> {
    let c = Cluster::start(lab)?;
    let load = Load {
        rounds: 16,
        chunk: 128 << 10,
        reply: 8,
        pause_ms: 0,
    };
    let t = Talk::start(lab, &c, &load)?;
    let addresses = t.addresses.clone();
    let size = load.rounds * load.chunk;
    let (tools, hashes) = t.captured(lab, &c, size / 2)?;
    let dir = tempfile::tempdir()?;
    for (n, tool) in tools.into_iter().enumerate() {
        let said = tool.wait()?;
        ensure!(said.stderr.contains("has ended"), "{said:?}");
        let file = fetch(lab, n, &dir)?;
        let all = packets(&file)?;
        let mut seen = 0;
        for address in &addresses {
            let port = address.rsplit(':').next().context("port")?;
            seen += compare(&all, port, true)?;
        }
        ensure!(seen > size as u64 / 20, "{seen} at node {n}: {said:?}");
        // (What went over TCP meanwhile is missing at both.)
        let late = all.iter().any(|p| p.comment.contains("was faster"));
        ensure!(n != SERVER || !late, "{said:?}");
        println!("node {n}: {seen} of {size} bytes: {}", said.stderr);
        if n == SERVER && said.stderr.contains("no gaps") {
            let port = addresses[0].rsplit(':').next().context("port")?;
            let streams = followed(&file, port)?;
            ensure!(hash_of_last(&streams[0], size)? == hashes[0]);
        }
    }
    c.no_resets()
}

/// So many times a capture has said that both directions are on the lane.
fn ups(tool: &Running) -> usize {
    tool.stderr().matches("SMCR in both directions").count()
}

fn await_ups(c: &Cluster, tool: &Running, n: usize) -> Result<()> {
    until(&format!("it has seen {n} lanes"), PATIENCE, || {
        ups(tool) == n
    })
    .with_context(|| format!("{}\n{}", tool.stderr(), c.picture()))
}

/// A rail is cut, and the lane goes on: so does a capture, without a gap. Both are, and the connection is on TCP for a while: a
/// gap, and it goes on. A node's daemon is killed: the captures that it has served break off, and say so; at the other
/// node it is a gap. All that they show is right.
pub fn a_capture_through_cuts_and_a_restart(lab: &mut Lab) -> Result<()> {
    let mut c = Cluster::start(lab)?;
    let load = Load {
        rounds: 60,
        chunk: 4 << 10,
        reply: 1000,
        pause_ms: 10,
    };
    let t = Talk::start(lab, &c, &load)?;
    let (addresses, port) = (t.addresses.clone(), t.port);
    let tools = [t.capture(lab, &c, 0)?, t.capture(lab, &c, 1)?];
    for (rail, other) in [(1, 2), (2, 1)] {
        lab.rail(rail).cut()?;
        c.await_traffic(lab, other)?;
        lab.rail(rail).mend()?;
        c.await_links()?;
    }
    for tool in &tools {
        ensure!(ups(tool) == 1, "{}\n{}", tool.stderr(), c.picture());
    }
    lab.rail(1).cut()?;
    lab.rail(2).cut()?;
    c.await_tcp(port, 1)?;
    lab.rail(1).mend()?;
    lab.rail(2).mend()?;
    c.await_smcr(port, 1)?;
    for tool in &tools {
        await_ups(&c, tool, 2)?;
    }
    let [cut_off, other] = tools;
    c.kill_daemon(0);
    let why = cut_off.wait()?.ok().err().context("it ended well")?;
    let why = why.to_string();
    let clear = why.contains("broke off") && why.contains("begin another one");
    ensure!(clear && why.contains("Code(1)"), "{why}");
    let (first, last) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let mut files = vec![(fetch(lab, 0, &first)?, 1)];
    c.start_daemon(lab, 0)?;
    c.await_channels()?;
    c.await_smcr(port, 1)?;
    await_ups(&c, &other, 3)?;
    let anew = t.capture(lab, &c, 0)?;
    let hashes = t.finish(lab)?;
    for (n, tool, gaps) in [(0, anew, 0), (1, other, 2)] {
        let said = tool.wait()?;
        ensure!(said.stderr.contains("has ended"), "{said:?}");
        let file = fetch(lab, n, &last)?;
        for (end, size) in [load.rounds * load.chunk, load.rounds * load.reply]
            .into_iter()
            .enumerate()
        {
            let port = addresses[end].rsplit(':').next().context("port")?;
            let streams = followed(&file, port)?;
            ensure!(hash_of_last(&streams[0], size)? == hashes[end], "{said:?}");
        }
        files.push((file, gaps));
    }
    for (file, gaps) in files {
        let all = packets(&file)?;
        for address in &addresses {
            let port = address.rsplit(':').next().context("port")?;
            ensure!(compare(&all, port, true)? > 0);
            let of = all.iter().filter(|p| p.from == port);
            let marks: Vec<&str> = of
                .map(|p| p.comment.as_str())
                .filter(|c| c.contains("missing"))
                .collect();
            println!("{}, {port}: {marks:?}", file.display());
            // (On a busy host a direction is on TCP for a moment now and then.)
            let tcp = marks.iter().all(|m| m.contains("they went over TCP"));
            ensure!(tcp && marks.len() >= gaps, "{gaps} gaps: {marks:?}");
        }
    }
    c.no_resets()
}
