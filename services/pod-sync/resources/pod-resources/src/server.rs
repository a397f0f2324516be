//! The socket of the API.

use std::io;
use std::path::{Path, PathBuf};

use quintlet_kit::server::{GuestLimits, Server};
use quintlet_kit::slots::Share;
use quintlet_kit::socket::{PeerPolicy, bind_unix};
use quintlet_pod_resources_api::v1::pod_resources_lister_server::PodResourcesListerServer;
use quintlet_pod_resources_api::v1alpha1::pod_resources_lister_server::PodResourcesListerServer as AlphaServer;
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;

use crate::service::PodResourcesApi;

/// Mode of the socket: agents run as root.
const MODE: u32 = 0o600;
/// Largest request: a name and a namespace, with room for fields of later versions.
const MOST_REQUEST_BYTES: usize = 64 << 10;
/// A node has a handful of agents. Together with the size of an answer, this bounds the memory for clients
/// that do not read.
const LIMITS: GuestLimits = GuestLimits { connections: Share { all: 64, each: 64 }, calls: 8 };

/// Returns the path of the socket.
#[must_use]
pub fn socket(root_dir: &Path) -> PathBuf {
    root_dir.join("pod-resources/kubelet.sock")
}

/// Creates the socket, in place of one that an earlier process left.
///
/// # Errors
/// The socket cannot be created, or another process serves it.
pub fn listen(root_dir: &Path) -> io::Result<UnixListener> {
    bind_unix(&socket(root_dir), MODE)
}

impl PodResourcesApi {
    /// Serves until `stop`. Only root and the user of this process may call.
    ///
    /// # Errors
    /// The transport fails.
    pub async fn serve(
        self,
        listener: UnixListener,
        stop: CancellationToken,
    ) -> Result<(), tonic::transport::Error> {
        let current = PodResourcesListerServer::new(self.clone());
        let first = AlphaServer::new(self);
        let server = Server::for_guests(LIMITS)
            .add_service(current.max_decoding_message_size(MOST_REQUEST_BYTES))
            .add_service(first.max_decoding_message_size(MOST_REQUEST_BYTES));
        server.serve(listener, PeerPolicy::root_and_self(), stop).await
    }
}
