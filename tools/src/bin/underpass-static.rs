//! The `underpass` command for containers: `make build` links it without libraries, since it cannot know which ones they
//! have.

#![forbid(unsafe_code)]

/// The probe of `check`, for the image's own dynamic linker.
#[cfg(underpass_probe)]
const PROBE: Option<&[u8]> = Some(include_bytes!(env!("UNDERPASS_PROBE")));
/// (Built by cargo alone, it has none. That it names the variable makes cargo compile it anew when `make build` sets it.)
#[cfg(not(underpass_probe))]
const PROBE: Option<&[u8]> = {
    let _ = option_env!("UNDERPASS_PROBE");
    None
};

fn main() -> std::process::ExitCode {
    underpass_tool::main_in_container(PROBE)
}
