//! `quintctl exec`, `attach` and `port-forward`.
//!
//! Cri-proxy's admin socket returns a URL of the runtime's streaming server. The command connects to that
//! server directly, over SPDY: every runtime supports it, and it can close standard input without the other
//! streams.

pub(crate) mod attach;
pub(crate) mod exec;
pub(crate) mod forward;
mod session;
mod terminal;

use quintlet_cri_api::v1::runtime_service_client::RuntimeServiceClient;
use quintlet_kit::args::paths::{CriSocket, Paths};
use quintlet_proto::podsync::v1::pod_sync_client::PodSyncClient;
use quintlet_proto::podsync::v1::{GetPodRequest, PodView};
use serde_json::Value;
use tonic::transport::Channel;

use crate::client::Peer;
use crate::error::Error;
use crate::logs::choose_container;

/// Fetches a pod by name or UID.
async fn pod(paths: &Paths, name: &str) -> Result<PodView, Error> {
    let peer = Peer::pod_sync(paths);
    let mut client = PodSyncClient::new(peer.channel().await?);
    peer.call(client.get_pod(GetPodRequest { pod: name.to_owned() })).await
}

/// Connects to cri-proxy's admin socket, which serves all CRI methods and which only root may open.
async fn cri(paths: &Paths) -> Result<(Peer, RuntimeServiceClient<Channel>), Error> {
    let peer = Peer::new("cri-proxy", paths.cri(CriSocket::Admin));
    let client = RuntimeServiceClient::new(peer.channel().await?);
    Ok((peer, client))
}

/// A running container.
#[derive(Debug, PartialEq, Eq)]
struct Running {
    name: String,
    /// Container ID without the runtime's scheme.
    id: String,
    /// `tty` of the container's spec.
    tty: bool,
    /// `stdin` of the container's spec.
    stdin: bool,
}

/// Returns the container `wanted`, or the default container.
///
/// # Errors
/// The pod has no such container, or the container is not running.
fn running(view: &PodView, wanted: Option<&str>) -> Result<Running, Error> {
    let object: Value = serde_json::from_slice(&view.pod).unwrap_or_default();
    let name = choose_container(&object, wanted)?;
    let find = |place: &str, lists: [&str; 3]| {
        lists
            .iter()
            .filter_map(|list| object.pointer(&format!("/{place}/{list}"))?.as_array())
            .flatten()
            .find(|c| c.get("name").and_then(Value::as_str) == Some(&name))
            .cloned()
            .unwrap_or_default()
    };
    let status = find("status", ["containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses"]);
    let spec = find("spec", ["containers", "initContainers", "ephemeralContainers"]);
    if status.pointer("/state/running").is_none() {
        return Err(Error::NotFound(format!(
            "container {name} of pod {}/{} is not running",
            view.namespace, view.name
        )));
    }
    let id = status.get("containerID").and_then(Value::as_str).unwrap_or_default();
    let flag = |key: &str| spec.get(key).and_then(Value::as_bool).unwrap_or(false);
    Ok(Running {
        id: id.split_once("://").map_or(id, |(_, id)| id).to_owned(),
        tty: flag("tty"),
        stdin: flag("stdin"),
        name,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_a_running_container_is_returned() {
        let pod = json!({
            "spec": {"containers": [{"name": "a", "tty": true}, {"name": "b"}]},
            "status": {"containerStatuses": [
                {"name": "a", "containerID": "containerd://c1", "state": {"running": {}}},
                {"name": "b", "containerID": "containerd://c2", "state": {"terminated": {}}},
            ]}
        });
        let view = PodView {
            name: "web".into(),
            namespace: "default".into(),
            pod: pod.to_string().into_bytes(),
            ..PodView::default()
        };
        let a = Running { name: "a".into(), id: "c1".into(), tty: true, stdin: false };
        assert_eq!(running(&view, None).unwrap(), a);
        assert_eq!(
            running(&view, Some("b")).unwrap_err().to_string(),
            "container b of pod default/web is not running"
        );
        assert!(running(&view, Some("c")).is_err());
    }
}
