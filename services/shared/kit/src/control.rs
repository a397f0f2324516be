//! Changes a running process: the filter of its log lines.

use std::time::Duration;

use quintlet_proto::debug::v1 as wire;
use quintlet_proto::debug::v1::control_server::{Control, ControlServer};
use quintlet_telemetry::log_filter::{self, FilterError};
use tonic::{Request, Response, Status};

use crate::socket::{Peer, PeerPolicy};
use crate::{task, timers};

/// Implements `debug.v1.Control`.
#[derive(Debug, Clone, Copy, Default)]
pub struct ControlService;

/// Returns `debug.v1.Control`.
#[must_use]
pub fn control() -> ControlServer<ControlService> {
    ControlServer::new(ControlService)
}

#[tonic::async_trait]
impl Control for ControlService {
    async fn set_log_filter(
        &self,
        request: Request<wire::SetLogFilterRequest>,
    ) -> Result<Response<wire::SetLogFilterReply>, Status> {
        // Users that may call the other methods of a socket may not change its process.
        let peer = request.extensions().get::<Peer>().copied();
        let Some(peer) = peer.filter(|peer| PeerPolicy::root_and_self().allows(peer.uid)) else {
            return Err(Status::permission_denied("only root and the user of the service may change it"));
        };
        let wire::SetLogFilterRequest { filter, seconds } = request.into_inner();
        if filter.is_empty() {
            let filter = log_filter::current().unwrap_or_default();
            return Ok(Response::new(wire::SetLogFilterReply { previous: filter.clone(), filter }));
        }
        let change = log_filter::replace(&filter, seconds == 0).map_err(|error| status(&error))?;
        tracing::info!(target: "audit", uid = peer.uid, filter, change.previous, seconds, "log filter changed");
        if seconds > 0 {
            let time = Duration::from_secs(seconds.into());
            task::spawn("log-filter", async move {
                timers::pause(time).await;
                if let Some(filter) = log_filter::restore(change.number) {
                    tracing::info!(target: "audit", filter, "log filter is as before");
                }
            });
        }
        Ok(Response::new(wire::SetLogFilterReply { filter, previous: change.previous }))
    }
}

fn status(error: &FilterError) -> Status {
    match error {
        FilterError::Invalid { .. } | FilterError::TooLong => Status::invalid_argument(error.to_string()),
        FilterError::NotInstalled => Status::failed_precondition(error.to_string()),
    }
}
