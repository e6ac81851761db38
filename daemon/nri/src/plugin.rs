//! The conversation of a plugin with the runtime.

use crate::frames::{self, Frame, Received, TooLong};
use crate::messages::{
    event, About, Adjustment, Configure, Configured, Container, ContainerCreated, CreateContainer,
    PodSandbox, RegisterPlugin, Request, Response, StateChange, Status, Synchronize, Synchronized,
    UNIMPLEMENTED,
};
use bytes::{Bytes, BytesMut};
use prost::{DecodeError, Message};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::{timeout_at, Instant};

/// Names of the two services.
const RUNTIME: &str = "nri.pkg.api.v1alpha1.Runtime";
const PLUGIN: &str = "nri.pkg.api.v1alpha1.Plugin";

/// The longest that a runtime takes to say what there is. (It waits until no pod is being made.)
const SILENCE: Duration = Duration::from_secs(60);

/// The plugin's only call.
const REGISTER: u32 = 1;

/// What a plugin does. The runtime waits while these run.
pub trait Plugin {
    /// The runtime has said who it is. It asks about containers only when it has said what there is.
    fn configured(&mut self, runtime: &Configure);

    /// These pods and containers are there, and no others.
    fn synchronize(&mut self, pods: Vec<PodSandbox>, containers: Vec<Container>);

    /// A container is about to be made; what is to be different? `None`: nothing.
    fn create(&mut self, pod: PodSandbox, container: Container) -> Option<Adjustment>;

    /// A pod has been made.
    fn pod_made(&mut self, pod: PodSandbox);

    /// A pod is gone.
    fn pod_gone(&mut self, pod: &PodSandbox);

    /// A container's processes have ended, or are about to. It does not start again.
    fn container_stopped(&mut self, container: &Container);

    /// A container is gone.
    fn container_gone(&mut self, container: &Container);
}

/// Why a conversation has ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// The runtime does not speak this protocol.
    #[error(transparent)]
    TooLong(#[from] TooLong),
    /// It does not want this plugin.
    #[error("the runtime refuses the plugin: {0}")]
    Refused(String),
    /// It has not said what there is, and will not ask about containers (<https://github.com/containerd/nri/issues/78>).
    #[error("the runtime does not say which pods there are")]
    Silent,
    /// Its answer cannot be read.
    #[error("the runtime's answer cannot be read: {0}")]
    Decode(#[from] DecodeError),
}

/// Speaks for `plugin` until the runtime ends the connection. `name` and `index` (two digits) are shown by the runtime;
/// plugins are called in the order of their indexes.
pub async fn serve<S: AsyncRead + AsyncWrite + Unpin>(
    mut stream: S,
    (name, index): (&str, &str),
    plugin: &mut impl Plugin,
) -> Result<(), Error> {
    let register = RegisterPlugin {
        name: name.into(),
        index: index.into(),
    };
    let call = Request {
        service: RUNTIME.into(),
        method: "RegisterPlugin".into(),
        payload: register.encode_to_vec().into(),
    };
    let mut out = BytesMut::new();
    frames::put(
        &mut out,
        &Frame {
            connection: frames::RUNTIME,
            call: REGISTER,
            kind: frames::REQUEST,
            payload: call.encode_to_vec().into(),
        },
    );
    stream.write_all(&out).await?;
    let (mut received, mut session) = (Received::default(), Session::new(plugin));
    let end = Instant::now() + SILENCE;
    loop {
        while let Some(frame) = received.next_frame()? {
            let Some(answer) = session.take(frame)? else {
                continue;
            };
            out.clear();
            frames::put(&mut out, &answer);
            stream.write_all(&out).await?;
        }
        let read = stream.read_buf(&mut received.raw);
        let read = match session.told {
            true => read.await?,
            false => timeout_at(end, read).await.map_err(|_| Error::Silent)??,
        };
        if read == 0 {
            return Ok(());
        }
    }
}

struct Session<'a, P> {
    plugin: &'a mut P,
    /// What has been listed, while more is to come.
    list: Synchronize,
    /// Has all been listed?
    told: bool,
}

impl<'a, P: Plugin> Session<'a, P> {
    fn new(plugin: &'a mut P) -> Self {
        Session {
            plugin,
            list: Synchronize::default(),
            told: false,
        }
    }

    /// A message of the runtime; the answer, if it was a call.
    fn take(&mut self, frame: Frame) -> Result<Option<Frame>, Error> {
        match (frame.connection, frame.kind) {
            (frames::RUNTIME, frames::RESPONSE) if frame.call == REGISTER => {
                let status = Response::decode(frame.payload)?.status;
                match status.filter(|s| s.code != 0) {
                    Some(s) => Err(Error::Refused(s.message)),
                    None => Ok(None),
                }
            }
            (frames::PLUGIN, frames::REQUEST) => {
                let answer = self.answer(frame.payload);
                Ok(Some(Frame {
                    kind: frames::RESPONSE,
                    payload: answer.encode_to_vec().into(),
                    ..frame
                }))
            }
            _ => Ok(None),
        }
    }

    fn answer(&mut self, call: Bytes) -> Response {
        let failed = |code, message: String| Response {
            status: Some(Status { code, message }),
            payload: Bytes::new(),
        };
        // An error would be the pod's or the container's. An empty answer changes nothing.
        let Ok(call) = Request::decode(call) else {
            return Response::default();
        };
        if call.service != PLUGIN {
            return failed(UNIMPLEMENTED, format!("no service {}", call.service));
        }
        match self.call(&call.method, call.payload) {
            Some(result) => Response {
                status: None,
                payload: result.unwrap_or_default().into(),
            },
            None => failed(UNIMPLEMENTED, format!("no method {}", call.method)),
        }
    }

    /// `None`: there is no such method. (Most results are empty messages.)
    fn call(&mut self, method: &str, argument: Bytes) -> Option<Result<Vec<u8>, DecodeError>> {
        let nothing = |()| Vec::new();
        Some(match method {
            "Configure" => Configure::decode(argument).map(|c| self.configure(&c)),
            "Synchronize" => Synchronize::decode(argument).map(|s| self.synchronize(s)),
            "CreateContainer" => CreateContainer::decode(argument).map(|c| self.create(c)),
            "StateChange" => StateChange::decode(argument)
                .map(|c| self.changed(c.event, c.pod, c.container))
                .map(nothing),
            "Shutdown" => Ok(Vec::new()),
            _ => {
                let event = match method {
                    "RunPodSandbox" => event::RUN_POD_SANDBOX,
                    "RemovePodSandbox" => event::REMOVE_POD_SANDBOX,
                    "RemoveContainer" => event::REMOVE_CONTAINER,
                    "StopContainer" => event::STOP_CONTAINER,
                    _ => return None,
                };
                let about = About::decode(argument);
                about
                    .map(|a| self.changed(event, a.pod, a.container))
                    .map(nothing)
            }
        })
    }

    fn configure(&mut self, runtime: &Configure) -> Vec<u8> {
        self.plugin.configured(runtime);
        let wanted = [
            event::RUN_POD_SANDBOX,
            event::REMOVE_POD_SANDBOX,
            event::CREATE_CONTAINER,
            event::STOP_CONTAINER,
            event::REMOVE_CONTAINER,
        ];
        let events = wanted.iter().fold(0, |bits, n| bits | 1 << (n - 1));
        Configured { events }.encode_to_vec()
    }

    fn synchronize(&mut self, s: Synchronize) -> Vec<u8> {
        // (A container may be listed before its pod.)
        self.list.pods.extend(s.pods);
        self.list.containers.extend(s.containers);
        if !s.more {
            let all = std::mem::take(&mut self.list);
            self.told = true;
            self.plugin.synchronize(all.pods, all.containers);
        }
        Synchronized { more: s.more }.encode_to_vec()
    }

    fn create(&mut self, c: CreateContainer) -> Vec<u8> {
        let (pod, container) = (c.pod.unwrap_or_default(), c.container.unwrap_or_default());
        let adjust = self.plugin.create(pod, container);
        ContainerCreated { adjust }.encode_to_vec()
    }

    fn changed(&mut self, event: i32, pod: Option<PodSandbox>, container: Option<Container>) {
        match (event, pod, container) {
            (event::RUN_POD_SANDBOX, Some(p), _) => self.plugin.pod_made(p),
            (event::REMOVE_POD_SANDBOX, Some(p), _) => self.plugin.pod_gone(&p),
            (event::STOP_CONTAINER, _, Some(c)) => self.plugin.container_stopped(&c),
            (event::REMOVE_CONTAINER, _, Some(c)) => self.plugin.container_gone(&c),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests;
