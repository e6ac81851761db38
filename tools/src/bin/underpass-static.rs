//! The `underpass` command for containers: `make build` links it without libraries, since it cannot know which ones they
//! have.

#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    underpass_tool::main_in_container()
}
