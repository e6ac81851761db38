//! `make deb`: `target/underpass/underpass_VERSION_amd64.deb`, from `deploy/debian` and what was built. dpkg-deb makes it:
//! cargo-deb would first have to be compiled, for minutes, on every machine. The form is debhelper's, so that the usual
//! tools of Debian find everything where they expect it.

use crate::package::{self, VERSION};
use crate::Tree;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const SCRIPTS: [&str; 3] = ["postinst", "prerm", "postrm"];

/// The completions of the tool, for each shell that it writes them for.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "usr/share/bash-completion/completions/underpass"),
    ("zsh", "usr/share/zsh/vendor-completions/_underpass"),
    ("fish", "usr/share/fish/vendor_completions.d/underpass.fish"),
];

/// Those that are linked to libraries of packages.
const LINKED: [&str; 3] = [
    "usr/bin/underpass",
    "usr/bin/underpassd",
    "usr/lib/underpass/libunderpass.so",
];

pub fn make(tree: &Tree) -> Result<(), String> {
    let at = tree.target.join("deb");
    let root = at.join("root");
    let debian = tree.root.join("deploy/debian");
    package::stage(tree, &root)?;
    let changelog = debian.join("changelog");
    let field = |name| {
        let mut c = Command::new("dpkg-parsechangelog");
        let text = package::says(c.arg("-l").arg(&changelog).args(["-S", name]));
        text.map(|t| t.trim().to_string())
    };
    let written = field("Version")?;
    if written != VERSION {
        return Err(format!(
            "{} is of {written}, not {VERSION}",
            changelog.display()
        ));
    }
    documents(tree, &debian, &root)?;
    let unit = root.join("usr/lib/systemd/system/underpassd.service");
    package::copy(&tree.root.join("deploy/underpassd.service"), &unit, 0o644)?;
    control(&at, &debian, &root)?;

    let deb = tree
        .target
        .join(format!("underpass/underpass_{VERSION}_amd64.deb"));
    let new = deb.with_extension("new");
    let mut build = Command::new("dpkg-deb");
    build
        .args(["--root-owner-group", "-Zxz", "--build"])
        .arg(&root)
        .arg(&new);
    // The times of all files: the same files make the same package.
    build.env("SOURCE_DATE_EPOCH", field("Timestamp")?);
    package::says(&mut build)?;
    fs::rename(&new, &deb).map_err(|e| format!("{}: {e}", deb.display()))?;
    let size = fs::metadata(&deb).map_or(0, |m| m.len());
    println!(
        "{}: {:.1} MiB",
        deb.display(),
        size as f64 / f64::from(1 << 20)
    );
    Ok(())
}

/// Manual pages, completions, changelog and licence.
fn documents(tree: &Tree, debian: &Path, root: &Path) -> Result<(), String> {
    let tool = tree.target.join("underpass/bin/underpass");
    for (shell, to) in COMPLETIONS {
        let text = package::says(Command::new(&tool).args(["completions", shell]))?;
        package::write(&root.join(to), text, 0o644)?;
    }
    let man = root.join("usr/share/man/man1");
    package::run(Command::new(&tool).args(["man", "--out"]).arg(&man))?;
    for page in files(&man)? {
        match page.display().to_string().contains("-help") {
            true => fs::remove_file(&page).map_err(|e| format!("{}: {e}", page.display()))?,
            false => gzip(&page)?,
        }
    }
    let help =
        package::says(Command::new(tree.target.join("underpass/bin/underpassd")).arg("--help"))?;
    let page = root.join("usr/share/man/man8/underpassd.8");
    package::write(&page, daemon_page(&help)?, 0o644)?;
    gzip(&page)?;
    let doc = root.join("usr/share/doc/underpass");
    package::copy(&debian.join("copyright"), &doc.join("copyright"), 0o644)?;
    package::copy(&debian.join("changelog"), &doc.join("changelog"), 0o644)?;
    gzip(&doc.join("changelog"))
}

/// Replaces a file by what it is when compressed, without its name and time.
fn gzip(file: &Path) -> Result<(), String> {
    package::run(Command::new("gzip").args(["-9", "-n"]).arg(file))
}

/// The daemon's manual page, from its own `--help`: it does not carry what would write the page.
fn daemon_page(help: &str) -> Result<String, String> {
    let strange = || format!("underpassd --help is not as expected:\n{help}");
    let (about, rest) = help.split_once("\n\nUsage: ").ok_or_else(strange)?;
    let (usage, options) = rest.split_once("\n\nOptions:\n").ok_or_else(strange)?;
    let name = usage.split(' ').next().unwrap_or_default();
    let mut page = format!(
        ".TH {name} 8 \"\" \"Underpass {VERSION}\"\n.SH NAME\n{name} \\- the daemon of Underpass\n.SH SYNOPSIS\n\
         {}\n.SH DESCRIPTION\n{}.\n.SH OPTIONS\n",
        roff(usage),
        roff(about)
    );
    for line in options.lines().filter(|l| !l.trim().is_empty()) {
        let text = line.trim();
        // An option, two spaces or more, and what it does; or that is continued.
        match text.starts_with('-').then(|| text.split_once("  ")) {
            Some(Some((option, what))) => {
                page += &format!(".TP\n\\fB{}\\fR\n{}\n", roff(option), roff(what.trim()));
            }
            Some(None) => return Err(strange()),
            None => page += &format!("{}\n", roff(text)),
        }
    }
    page += ".SH FILES\n.TP\n/etc/underpass/underpassd.toml\nEvery setting, with its default.\n\
             .SH SEE ALSO\n.BR underpass (1)\n";
    Ok(page)
}

/// As roff prints it unchanged.
fn roff(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    match text.starts_with(['.', '\'']) {
        true => format!("\\&{text}"),
        false => text,
    }
}

/// What dpkg knows of the package.
fn control(at: &Path, debian: &Path, root: &Path) -> Result<(), String> {
    let to = root.join("DEBIAN");
    package::anew(&to)?;
    let all = tidy(root)?;
    let depends = depends(at, root)?;
    let kib: u64 = all
        .iter()
        .map(|f| fs::metadata(f).map_or(0, |m| m.len().div_ceil(1024)))
        .sum();
    let path = debian.join("control");
    let text = fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    let text = text
        .replace("@VERSION@", VERSION)
        .replace("@DEPENDS@", &depends)
        .replace("@SIZE@", &kib.to_string());
    package::write(&to.join("control"), text, 0o644)?;
    for script in SCRIPTS {
        package::copy(&debian.join(script), &to.join(script), 0o755)?;
    }
    let names = all.iter().filter_map(|f| f.strip_prefix(root).ok());
    let (settings, rest): (Vec<&Path>, Vec<&Path>) = names.partition(|f| f.starts_with("etc"));
    let settings: String = settings
        .iter()
        .map(|f| format!("/{}\n", f.display()))
        .collect();
    package::write(&to.join("conffiles"), settings, 0o644)?;
    let sums = package::says(Command::new("md5sum").args(rest).current_dir(root))?;
    package::write(&to.join("md5sums"), sums, 0o644)
}

/// The packages of the libraries that it is linked to, with the versions that have what it uses.
fn depends(at: &Path, root: &Path) -> Result<String, String> {
    // (It insists on the source package's file.)
    let source = at.join("debian/control");
    package::write(
        &source,
        "Source: underpass\n\nPackage: underpass\nArchitecture: any\n",
        0o644,
    )?;
    let mut c = Command::new("dpkg-shlibdeps");
    c.arg("-O")
        .args(LINKED.map(|f| root.join(f)))
        .current_dir(at);
    let text = package::says(&mut c)?;
    let found = text
        .trim()
        .strip_prefix("shlibs:Depends=")
        .filter(|d| d.contains("libc6"));
    found
        .map(String::from)
        .ok_or(format!("dpkg-shlibdeps says {text:?}"))
}

/// All files below a directory, in the order of their names. Whatever the umask is, everybody may read all, and only the
/// owner may write.
fn tidy(dir: &Path) -> Result<Vec<PathBuf>, String> {
    let fail = |e| format!("{}: {e}", dir.display());
    fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).map_err(fail)?;
    let mut all = Vec::new();
    for path in files(dir)? {
        if path.is_dir() {
            all.extend(tidy(&path)?);
            continue;
        }
        let program = fs::metadata(&path).map_err(fail)?.permissions().mode() & 0o100 != 0;
        let mode = if program { 0o755 } else { 0o644 };
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).map_err(fail)?;
        all.push(path);
    }
    Ok(all)
}

/// What is in a directory, in the order of the names.
fn files(dir: &Path) -> Result<Vec<PathBuf>, String> {
    let list = fs::read_dir(dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    let mut all: Vec<PathBuf> = list.flatten().map(|f| f.path()).collect();
    all.sort();
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HELP: &str = "Pairs ends\n\nUsage: underpassd [OPTIONS]\n\nOptions:\n      --dir <DIR>  Directory, else\n                   \
                        .local for others\n  -h, --help       Print help\n";

    #[test]
    fn a_page_from_help() -> Result<(), String> {
        let page = daemon_page(HELP)?;
        let options = ".SH OPTIONS\n.TP\n\\fB\\-\\-dir <DIR>\\fR\nDirectory, else\n\\&.local for others\n.TP\n\
                       \\fB\\-h, \\-\\-help\\fR\nPrint help\n.SH FILES";
        assert!(page.contains(options), "{page}");
        assert!(page.contains(".SH DESCRIPTION\nPairs ends.\n"), "{page}");
        assert!(daemon_page("Usage: underpassd\n").is_err());
        Ok(())
    }
}
