//! The connections to the runtime.

use http::Response;
use hyper::body::Incoming;
use tokio::time::Instant;

use super::call::Call;
use crate::reply::{self, Frames};
use crate::upstream::{SendError, Upstream};
use crate::{lists, policy};

/// The connections to the runtime and to its image service.
#[derive(Debug)]
pub(super) struct Upstreams {
    runtime: Upstream,
    /// The image service, if it has another socket.
    images: Option<Upstream>,
}

impl Upstreams {
    pub(super) fn new(runtime: Upstream, images: Option<Upstream>) -> Self {
        Self { runtime, images }
    }

    pub(super) fn runtime(&self) -> &Upstream {
        &self.runtime
    }

    /// Returns the connection for a method.
    pub(super) fn of(&self, path: &str) -> &Upstream {
        let is_image = path.strip_prefix('/').and_then(|p| p.split('/').next()) == Some(policy::IMAGE);
        self.images.as_ref().filter(|_| is_image).unwrap_or(&self.runtime)
    }

    /// Sends the call as `method`. Returns the head of the response.
    pub(super) async fn send_as(
        &self,
        call: &Call,
        method: &'static str,
        deadline: Option<Instant>,
    ) -> Result<Response<Incoming>, SendError> {
        let mut headers = call.headers.clone();
        if let Some(deadline) = deadline {
            let left = deadline.saturating_duration_since(Instant::now());
            headers.insert("grpc-timeout", reply::grpc_timeout_value(left));
        }
        if lists::list_methods(call.policy).is_some() || call.short_output.is_some() {
            // The messages are parsed here, so they must not be compressed.
            headers.remove("grpc-accept-encoding");
        }
        let path = format!("/{}/{method}", call.policy.service);
        let request = reply::request(&path, headers, Frames::from_data(vec![call.body.clone()]));
        self.of(&path).send(request).await
    }
}
