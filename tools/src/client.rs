//! Asks the daemon that arguments and environment select.

use crate::out::{clean, Failure};
use std::io::BufReader;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use underpass_admin::places::{self, Places};
use underpass_admin::{client, Request, Response};

impl From<client::Error> for Failure {
    fn from(e: client::Error) -> Self {
        Failure::new(clean(&e.to_string()))
    }
}

impl From<places::Error> for Failure {
    fn from(e: places::Error) -> Self {
        Failure::new(e)
    }
}

pub fn ask(dir: Option<PathBuf>, request: &Request) -> Result<Response, Failure> {
    let places = Places::here(dir);
    let dir = places.choose();
    places.check_owner(dir)?;
    ask_in(dir, request)
}

/// The same for a request to which more follows than the answer.
pub fn follow(
    dir: Option<PathBuf>,
    request: &Request,
) -> Result<(Response, BufReader<UnixStream>), Failure> {
    let places = Places::here(dir);
    let dir = places.choose();
    places.check_owner(dir)?;
    Ok(client::follow(dir, request)?)
}

/// Asks the daemon in `dir`.
pub fn ask_in(dir: &Path, request: &Request) -> Result<Response, Failure> {
    Ok(client::ask(dir, request)?)
}

/// The failure for an answer that does not fit the question.
pub fn unexpected(r: &Response) -> Failure {
    client::unexpected(r).into()
}
