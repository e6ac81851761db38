//! `underpass certs`: a private CA and node certificates, for sites without a CA of their own.
//!
//! From the moment they exist, keys are readable only by their owner; files appear completely or not at all; and
//! nothing is overwritten without `--force`. No daemon is needed.

use crate::cli;
use crate::out::{self, clean, Failure, Outcome};
use nix::fcntl::{open, OFlag};
use nix::sys::stat::Mode;
use rcgen::{ExtendedKeyUsagePurpose, Issuer, KeyPair};
use serde_json::{json, Value};
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use time::OffsetDateTime;
use underpass_admin::certificate::{authority, facts_of_pem, holder, valid_name, Facts};

pub fn run(o: &cli::Certs) -> Outcome {
    match o {
        cli::Certs::Ca(o) => ca(o),
        cli::Certs::Node(o) => node(o),
        cli::Certs::Show(o) => show(o),
    }
}

fn fail(path: &Path) -> impl Fn(std::io::Error) -> Failure + '_ {
    |e| Failure::new(format_args!("{}: {e}", path.display()))
}

fn making(e: rcgen::Error) -> Failure {
    Failure::new(format_args!("cannot make a certificate: {e}"))
}

/// A file under a temporary name.
struct Draft {
    tmp: PathBuf,
    to: PathBuf,
}

impl Draft {
    fn write(to: PathBuf, text: &str, mode: Mode) -> Result<Draft, Failure> {
        let mut name = to.file_name().unwrap_or_default().to_os_string();
        name.push(format!(".{}.new", std::process::id()));
        let tmp = to.with_file_name(name);
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_CLOEXEC;
        let fd = open(&tmp, flags, mode).map_err(|e| fail(&tmp)(e.into()))?;
        let draft = Draft { tmp, to };
        let mut f = File::from(fd);
        let put = f.write_all(text.as_bytes()).and_then(|()| f.sync_all());
        put.map_err(fail(&draft.to))?;
        Ok(draft)
    }

    /// Gives the file its name. Unlike a rename, a hard link replaces nothing.
    fn publish(&self, force: bool) -> Result<(), Failure> {
        let done = match force {
            true => fs::rename(&self.tmp, &self.to),
            false => fs::hard_link(&self.tmp, &self.to),
        };
        done.map_err(|e| match e.kind() {
            ErrorKind::AlreadyExists => exists(&self.to),
            _ => fail(&self.to)(e),
        })
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.tmp); // gone already if it was renamed
    }
}

fn exists(path: &Path) -> Failure {
    Failure::new(format_args!(
        "{} exists already; --force replaces it",
        path.display()
    ))
}

/// Writes a key and its certificate.
fn save(dir: &Path, name: &str, key: &str, cert: &str, force: bool) -> Result<(), Failure> {
    fs::create_dir_all(dir).map_err(fail(dir))?;
    let at = |ext: &str| dir.join(format!("{name}.{ext}"));
    if !force {
        let there = [at("key"), at("crt")];
        if let Some(p) = there.iter().find(|p| p.symlink_metadata().is_ok()) {
            return Err(exists(p));
        }
    }
    let k = Draft::write(at("key"), key, Mode::S_IRUSR | Mode::S_IWUSR)?;
    let readable = Mode::S_IRUSR | Mode::S_IWUSR | Mode::S_IRGRP | Mode::S_IROTH;
    let c = Draft::write(at("crt"), cert, readable)?;
    k.publish(force)?;
    c.publish(force).inspect_err(|_| {
        if !force {
            let _ = fs::remove_file(&k.to); // a key without its certificate is of no use
        }
    })?;
    out::print(&format!(
        "{}\n{}  (keep it secret)\n",
        c.to.display(),
        k.to.display()
    ))
}

fn ca(o: &cli::CertsCa) -> Outcome {
    let (p, key) = authority(&o.name, OffsetDateTime::now_utc(), o.days).map_err(making)?;
    let cert = p.self_signed(&key).map_err(making)?;
    save(&o.out, "ca", &key.serialize_pem(), &cert.pem(), o.force)?;
    Ok(ExitCode::SUCCESS)
}

fn read(path: &Path) -> Result<String, Failure> {
    fs::read_to_string(path).map_err(|e| match e.kind() {
        ErrorKind::NotFound => Failure::new(format_args!(
            "{} does not exist; `underpass certs ca` makes a CA",
            path.display()
        )),
        _ => fail(path)(e),
    })
}

fn node(o: &cli::CertsNode) -> Outcome {
    if let Some(bad) = o.names().find(|n| !valid_name(n)) {
        return Err(Failure::new(format_args!(
            "`{bad}` is no node name: lower-case letters, digits, `-` and `.`"
        ))
        .with_code(2));
    }
    let (crt, key) = (o.ca.join("ca.crt"), o.ca.join("ca.key"));
    let (crt_text, key_text) = (read(&crt)?, read(&key)?);
    let ca_key = KeyPair::from_pem(&key_text)
        .map_err(|e| Failure::new(format_args!("{}: no usable key: {e}", key.display())))?;
    let bad_ca = |why: &str| Failure::new(format_args!("{}: {why}", crt.display()));
    let ca = facts_of_pem(&crt_text).ok_or_else(|| bad_ca("no certificate"))?;
    if !ca.ca {
        return Err(bad_ca("not the certificate of a CA"));
    }
    if ca.public_key != ca_key.public_key_raw() {
        return Err(bad_ca(&format!("not the certificate of {}", key.display())));
    }
    let issuer = Issuer::from_ca_cert_pem(&crt_text, ca_key).map_err(making)?;
    let key = KeyPair::generate().map_err(making)?;
    // Each node is a server to some peers and a client to others.
    let usages = [
        ExtendedKeyUsagePurpose::ServerAuth,
        ExtendedKeyUsagePurpose::ClientAuth,
    ];
    let names = o.names().cloned().collect();
    let now = OffsetDateTime::now_utc();
    let mut p = holder(names, &o.name, now, o.days, &usages).map_err(making)?;
    let end = OffsetDateTime::from_unix_timestamp(ca.not_after).unwrap_or(p.not_after);
    if end <= now {
        return Err(bad_ca("this CA has expired; make a new one"));
    }
    if p.not_after > end {
        p.not_after = end;
        out::complain(format_args!(
            "valid only as long as its CA: until {}",
            date(ca.not_after)
        ));
    }
    let cert = p.signed_by(&key, &issuer).map_err(making)?;
    save(&o.out, &o.name, &key.serialize_pem(), &cert.pem(), o.force)?;
    Ok(ExitCode::SUCCESS)
}

/// A time for people to read.
pub fn date(t: i64) -> String {
    match OffsetDateTime::from_unix_timestamp(t) {
        Ok(d) => format!("{} {:02}:{:02} UTC", d.date(), d.hour(), d.minute()),
        Err(_) => format!("{t} s"),
    }
}

fn validity(f: &Facts) -> String {
    let now = OffsetDateTime::now_utc().unix_timestamp();
    let days = |t: i64| (t - now) / 86_400;
    match (f.not_before <= now, now <= f.not_after) {
        (false, _) => format!("not valid before {}", date(f.not_before)),
        (true, true) => format!("until {} ({} days)", date(f.not_after), days(f.not_after)),
        (true, false) => format!("EXPIRED {}", date(f.not_after)),
    }
}

fn show(o: &cli::CertsShow) -> Outcome {
    let mut all = Vec::new();
    let mut text = String::new();
    for path in &o.files {
        let pem = fs::read_to_string(path).map_err(fail(path))?;
        let f = facts_of_pem(&pem).ok_or_else(|| {
            Failure::new(format_args!("{}: no certificate in it", path.display()))
        })?;
        let kind = if f.ca { "CA" } else { "node" };
        text.push_str(&format!("{}\n", path.display()));
        for (label, value) in [
            ("kind", kind.into()),
            ("subject", clean(&f.subject)),
            ("issuer", clean(&f.issuer)),
            ("names", clean(&f.names.join(", "))),
            ("valid", validity(&f)),
        ] {
            if !value.is_empty() {
                text.push_str(&format!("  {label:<8} {value}\n"));
            }
        }
        all.push(json!({
            "file": path, "kind": kind, "subject": f.subject, "issuer": f.issuer,
            "names": f.names, "not_before": f.not_before, "not_after": f.not_after,
        }));
    }
    match o.json {
        true => out::print_json(&Value::from(all))?,
        false => out::print(&text)?,
    }
    Ok(ExitCode::SUCCESS)
}
