//! Keys and certificates of a cluster, and the files that name them.

use anyhow::Result;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
};
use underpass_tests::harness::machine::Machine;

/// Where they are on the machine.
pub const DIR: &str = "/etc/kubernetes";

/// Who has a certificate: file name, common name, organisation, names and addresses.
pub struct Holder<'a> {
    pub file: &'a str,
    pub name: &'a str,
    pub organisation: &'a str,
    pub at: &'a [&'a str],
}

/// Makes a CA, a certificate and a file for clients for each holder, and the key that service accounts' tokens are signed
/// with.
pub fn make(machine: &Machine, server: &str, holders: &[Holder]) -> Result<()> {
    let key = KeyPair::generate()?;
    let mut ca = CertificateParams::default();
    ca.distinguished_name.push(DnType::CommonName, "test-ca");
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    machine.write(&format!("{DIR}/ca.crt"), &ca.self_signed(&key)?.pem())?;
    machine.write(&format!("{DIR}/ca.key"), &key.serialize_pem())?;
    let issuer = Issuer::new(ca, key);
    for h in holders {
        let names: Vec<String> = h.at.iter().map(|n| (*n).into()).collect();
        let mut p = CertificateParams::new(names)?;
        p.distinguished_name.push(DnType::CommonName, h.name);
        p.distinguished_name
            .push(DnType::OrganizationName, h.organisation);
        p.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        let key = KeyPair::generate()?;
        let file = format!("{DIR}/{}", h.file);
        machine.write(&format!("{file}.crt"), &p.signed_by(&key, &issuer)?.pem())?;
        machine.write(&format!("{file}.key"), &key.serialize_pem())?;
        machine.write(&format!("{file}.conf"), &client_file(server, &file))?;
    }
    let tokens = KeyPair::generate()?;
    machine.write(&format!("{DIR}/tokens.key"), &tokens.serialize_pem())?;
    machine.write(&format!("{DIR}/tokens.pub"), &tokens.public_key_pem())
}

/// Gives another node what it needs: whom to trust, its own key, and the administrator's.
pub fn copy(from: &Machine, to: &Machine, node: &str) -> Result<()> {
    let all = ["crt", "key", "conf"];
    let of = |name: &str| all.map(|ext| format!("{DIR}/{name}.{ext}"));
    let mut files = [of(node), of("admin")].concat();
    files.push(format!("{DIR}/ca.crt"));
    for f in files {
        to.write(&f, &std::fs::read_to_string(from.path(&f))?)?;
    }
    Ok(())
}

fn client_file(server: &str, file: &str) -> String {
    format!(
        r#"apiVersion: v1
kind: Config
clusters: [{{name: c, cluster: {{server: "{server}", certificate-authority: {DIR}/ca.crt}}}}]
users: [{{name: u, user: {{client-certificate: {file}.crt, client-key: {file}.key}}}}]
contexts: [{{name: x, context: {{cluster: c, user: u}}}}]
current-context: x
"#
    )
}
