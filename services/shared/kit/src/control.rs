//! Operates a running process: the filter of its log lines, and profiles of it.

use std::time::Duration;

use futures::{StreamExt as _, stream};
use quintlet_profile::cpu::{ProfileError, Sampling};
use quintlet_proto::debug::v1 as wire;
use quintlet_proto::debug::v1::control_server::{Control, ControlServer};
use quintlet_proto::limits;
use quintlet_telemetry::log_filter::{self, FilterError};
use tonic::{Request, Response, Status};

use crate::messages::Bounded;
use crate::socket::{Peer, PeerPolicy};
use crate::{error_chain, profile, task, timers};

/// Implements `debug.v1.Control`.
#[derive(Debug, Clone, Copy, Default)]
pub struct ControlService;

/// Returns `debug.v1.Control`.
#[must_use]
pub fn control() -> ControlServer<ControlService> {
    ControlServer::new(ControlService)
}

/// Returns the caller. Users that may call the other methods of a socket may not operate its process.
fn operator<T>(request: &Request<T>) -> Result<Peer, Status> {
    let peer = request.extensions().get::<Peer>().copied();
    peer.filter(|peer| PeerPolicy::root_and_self().allows(peer.uid))
        .ok_or_else(|| Status::permission_denied("only root and the user of the service may do that"))
}

#[tonic::async_trait]
impl Control for ControlService {
    async fn set_log_filter(
        &self,
        request: Request<wire::SetLogFilterRequest>,
    ) -> Result<Response<wire::SetLogFilterReply>, Status> {
        let peer = operator(&request)?;
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

    type ProfileStream = Bounded<wire::ProfileReply>;

    async fn profile(
        &self,
        request: Request<wire::ProfileRequest>,
    ) -> Result<Response<Self::ProfileStream>, Status> {
        let peer = operator(&request)?;
        let wire::ProfileRequest { kind, seconds, hertz } = request.into_inner();
        let answer = match wire::ProfileKind::try_from(kind) {
            Ok(wire::ProfileKind::Cpu) => {
                let sampling = Sampling::new(seconds, hertz).map_err(|error| refusal(&error))?;
                let running = profile::start(sampling).await.map_err(|error| refusal(&error))?;
                tracing::info!(target: "audit", uid = peer.uid, seconds, hertz, "CPU profile started");
                // The headers of the answer arrive at the start: the caller knows that the profile is taken.
                let pieces = stream::once(running.finish()).flat_map(|profile| stream::iter(pieces(profile)));
                Bounded::new("Control.Profile", pieces)
            }
            Ok(wire::ProfileKind::Heap) => {
                let profile = profile::heap().await.map_err(|error| refusal(&error))?;
                tracing::info!(target: "audit", uid = peer.uid, "heap profile taken");
                Bounded::new("Control.Profile", stream::iter(pieces(Ok(profile))))
            }
            Ok(wire::ProfileKind::Unspecified) | Err(_) => {
                return Err(Status::invalid_argument("kind must be PROFILE_KIND_CPU or PROFILE_KIND_HEAP"));
            }
        };
        Ok(Response::new(answer))
    }
}

/// Splits a profile into messages.
fn pieces(profile: Result<Vec<u8>, ProfileError>) -> Vec<Result<wire::ProfileReply, Status>> {
    match profile {
        Ok(bytes) => {
            bytes.chunks(limits::PIECE).map(|piece| Ok(wire::ProfileReply { data: piece.to_vec() })).collect()
        }
        Err(error) => vec![Err(refusal(&error))],
    }
}

fn refusal(error: &ProfileError) -> Status {
    match error {
        ProfileError::OutOfBounds { .. } => Status::invalid_argument(error.to_string()),
        ProfileError::Busy => Status::resource_exhausted(error.to_string()),
        ProfileError::NoHeapProfile(_) => Status::failed_precondition(error.to_string()),
        ProfileError::File { .. } | ProfileError::Profiler { .. } => Status::internal(error_chain(error)),
    }
}

fn status(error: &FilterError) -> Status {
    match error {
        FilterError::Invalid { .. } | FilterError::TooLong => Status::invalid_argument(error.to_string()),
        FilterError::NotInstalled => Status::failed_precondition(error.to_string()),
    }
}
