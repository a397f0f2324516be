//! `quintctl port-forward`: forwards local ports to ports of a pod.
//!
//! Tasks: one per listening port and one per connection. All connections share one connection to the
//! runtime's streaming server, which is replaced when it is lost.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use quintlet_cri_api::v1::{
    ListPodSandboxRequest, PodSandboxFilter, PodSandboxState, PodSandboxStateValue, PortForwardRequest,
};
use quintlet_kit::args::paths::Paths;
use quintlet_kit::task::TaskGroup;
use quintlet_spdy::{Connection, Stream};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, mpsc};

use super::{cri, pod};
use crate::error::Error;
use crate::out::print;

/// Buffer size of a read, in bytes.
const BLOCK: usize = 32 << 10;
/// Capacity of the channel of messages to the terminal.
const MESSAGES: usize = 16;

/// Forward local ports to ports of a pod.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct ForwardArgs {
    /// Pod: name, NAMESPACE/NAME or UID
    pub(crate) pod: String,
    /// LOCAL:POD, POD for the same port on both sides, or :POD for any free local port; repeatable
    #[arg(required = true, value_name = "PORTS", value_parser = ports)]
    pub(crate) ports: Vec<(u16, u16)>,
    /// Local address to listen on
    #[arg(long, value_name = "ADDRESS", default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    pub(crate) address: IpAddr,
}

fn ports(text: &str) -> Result<(u16, u16), String> {
    let number = |text: &str| text.parse::<u16>().map_err(|e| format!("{text:?}: {e}"));
    let (local, remote) = match text.split_once(':') {
        None => (number(text)?, number(text)?),
        Some(("", remote)) => (0, number(remote)?),
        Some((local, remote)) => (number(local)?, number(remote)?),
    };
    if remote == 0 {
        Err("port of the pod must be between 1 and 65535".to_owned())
    } else {
        Ok((local, remote))
    }
}

/// Forwards until interrupted.
///
/// # Errors
/// The pod does not exist or has no ready sandbox; a local port is in use; a service does not answer.
pub(crate) async fn run(args: ForwardArgs, paths: &Paths) -> Result<(), Error> {
    let view = pod(paths, &args.pod).await?;
    let target = Arc::new(Target {
        paths: paths.clone(),
        uid: view.uid.clone(),
        name: view.name,
        shared: Mutex::default(),
    });
    // Connect now, so that an error is reported before the first connection.
    target.connection().await?;
    let tasks = TaskGroup::new();
    let (messages, mut message) = quintlet_kit::queue::channel("messages", MESSAGES);
    for (local, remote) in args.ports {
        let address = SocketAddr::new(args.address, local);
        let listener = TcpListener::bind(address).await.map_err(Error::os(format!("listen on {address}")))?;
        let bound = listener.local_addr().map_err(Error::os("get the local port"))?;
        print(format!("Forwarding from {bound} -> {remote}\n"))?;
        tasks.spawn("forward", accept(listener, remote, Arc::clone(&target), messages.clone()));
    }
    drop(messages);
    while let Some(text) = message.recv().await {
        print(format!("{text}\n"))?;
    }
    Ok(())
}

struct Target {
    paths: Paths,
    uid: String,
    name: String,
    shared: Mutex<Shared>,
}

#[derive(Default)]
struct Shared {
    connection: Option<Connection>,
    requests: u64,
}

impl Target {
    async fn connection(&self) -> Result<Connection, Error> {
        let mut shared = self.shared.lock().await;
        if let Some(connection) = &shared.connection {
            return Ok(connection.clone());
        }
        let connection = self.connect().await?;
        shared.connection = Some(connection.clone());
        Ok(connection)
    }

    async fn connect(&self) -> Result<Connection, Error> {
        let (peer, mut client) = cri(&self.paths).await?;
        let ready = PodSandboxStateValue { state: PodSandboxState::SandboxReady.into() };
        let filter = PodSandboxFilter {
            state: Some(ready),
            label_selector: [("io.kubernetes.pod.uid".to_owned(), self.uid.clone())].into(),
            ..PodSandboxFilter::default()
        };
        let sandboxes =
            peer.call(client.list_pod_sandbox(ListPodSandboxRequest { filter: Some(filter) })).await?.items;
        let newest = sandboxes.into_iter().max_by_key(|s| s.metadata.as_ref().map_or(0, |m| m.attempt));
        let sandbox =
            newest.ok_or_else(|| Error::NotFound(format!("pod {} has no ready sandbox", self.name)))?;
        let request = PortForwardRequest { pod_sandbox_id: sandbox.id, port: Vec::new() };
        let url = peer.call(client.port_forward(request)).await?.url;
        Connection::open(&url, &["portforward.k8s.io"])
            .await
            .map_err(|e| Error::Streaming(quintctl_text::clean(&quintlet_kit::error_chain(&e))))
    }

    /// Opens the error stream and the data stream of a forwarded connection. A lost shared connection is
    /// replaced once.
    async fn streams(&self, port: u16) -> Result<(Connection, Stream, Stream), Error> {
        for _ in 0..2 {
            let connection = self.connection().await?;
            let id = {
                let mut shared = self.shared.lock().await;
                shared.requests += 1;
                shared.requests.to_string()
            };
            let port = port.to_string();
            let headers = |kind| [("streamType", kind), ("port", port.as_str()), ("requestID", id.as_str())];
            // The runtime's server requires the error stream first.
            if let Some(error) = connection.stream(&headers("error")).await
                && let Some(data) = connection.stream(&headers("data")).await
            {
                error.writer.end().await;
                return Ok((connection, error, data));
            }
            self.shared.lock().await.connection = None;
        }
        Err(Error::Streaming("failed to open streams: the runtime closed the connection".to_owned()))
    }
}

async fn accept(listener: TcpListener, port: u16, target: Arc<Target>, messages: mpsc::Sender<String>) {
    let tasks = TaskGroup::new();
    while let Ok((tcp, _)) = listener.accept().await {
        let (target, messages) = (Arc::clone(&target), messages.clone());
        tasks.spawn("forwarded connection", async move {
            let error = match carry(tcp, port, &target).await {
                Ok(reported) => reported,
                Err(error) => quintlet_kit::error_chain(&error),
            };
            if !error.is_empty() {
                // The receiver is dropped when the command ends; that is not an error.
                let _ = messages.send(format!("port {port}: {}", quintctl_text::clean(&error))).await;
            }
        });
    }
}

/// Copies bytes in both directions until both sides are closed. Returns the text of the error stream, which
/// is empty on success.
async fn carry(tcp: TcpStream, port: u16, target: &Target) -> Result<String, Error> {
    let (connection, mut error, data) = target.streams(port).await?;
    let (mut read, mut write) = tcp.into_split();
    let Stream { writer, mut blocks } = data;
    let to_pod = async {
        let mut buffer = vec![0; BLOCK];
        while let Ok(n @ 1..) = read.read(&mut buffer).await {
            if !writer.send(&buffer[..n]).await {
                return;
            }
        }
        writer.end().await;
    };
    let from_pod = async {
        while let Some(block) = blocks.recv().await {
            if write.write_all(&block).await.is_err() {
                return;
            }
        }
        // The other direction may still be open.
        let _ = write.shutdown().await;
    };
    let error_text = async {
        let mut text = Vec::new();
        while let Some(block) = error.blocks.recv().await {
            text.extend(block);
        }
        String::from_utf8_lossy(&text).into_owned()
    };
    // When the pod's side is closed, data to the pod has no receiver.
    let error_text = tokio::select! {
        (text, ()) = async { tokio::join!(error_text, from_pod) } => text,
        () = async { to_pod.await; std::future::pending::<()>().await } => String::new(),
    };
    connection.forget(&writer);
    connection.forget(&error.writer);
    Ok(error_text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_has_three_forms() {
        for (text, want) in [
            ("8080", Some((8080, 8080))),
            ("80:8080", Some((80, 8080))),
            (":8080", Some((0, 8080))),
            ("0", None),
            ("80:", None),
            ("x:1", None),
            ("70000", None),
        ] {
            assert_eq!(ports(text).ok(), want, "{text}");
        }
    }
}
