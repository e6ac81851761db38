//! All fuzz targets in one program, which libFuzzer drives: `UNDERPASS_FUZZ` names the target, and the target's seeds
//! are written to the directory `UNDERPASS_FUZZ_SEEDS` before libFuzzer reads its inputs. `make fuzz` builds it, with
//! coverage counted, and runs it.

#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
mod fuzz {
    use std::sync::OnceLock;
    use underpass_fuzz::{find, seeds, Target};

    static TARGET: OnceLock<Target> = OnceLock::new();

    /// The target, and its seeds, as the environment says.
    fn begin() {
        let name = std::env::var("UNDERPASS_FUZZ").expect("UNDERPASS_FUZZ names the target");
        let target = find(&name).expect("a target");
        TARGET.get_or_init(|| target);
        if let Some(dir) = std::env::var_os("UNDERPASS_FUZZ_SEEDS") {
            seeds::write(target.0, dir.as_ref()).expect("seeds");
        }
    }

    libfuzzer_sys::fuzz_target!(
        init: begin(),
        |data: &[u8]| {
            if let Some((_, run)) = TARGET.get() {
                run(data);
            }
        }
    );
}

#[cfg(not(fuzzing))]
fn main() {
    eprintln!("no libFuzzer in this build: `make fuzz`");
    std::process::exit(2);
}
