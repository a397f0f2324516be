//! Serves `pleg.v1` from the store and by inspections.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use quintlet_kit::messages::Bounded;
use quintlet_model::ids::PodUid;
use quintlet_model::runtime::Cursor;
use quintlet_proto::pleg::v1 as pb;
use quintlet_proto::pleg::v1::pleg_server::Pleg;
use quintlet_telemetry::propagate;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};
use tracing::Instrument as _;

use crate::core::Core;
use crate::health;
use crate::mailbox::InspectionRequest;

/// The gRPC service. Clones share it.
#[derive(Clone)]
pub struct PlegService {
    core: Arc<Core>,
    /// Ends the streams at the stop.
    stop: CancellationToken,
}

impl PlegService {
    pub(crate) fn new(core: Arc<Core>, stop: CancellationToken) -> Self {
        Self { core, stop }
    }
}

fn pod_uid(text: &str) -> Result<PodUid, Status> {
    PodUid::parse(text).map_err(|e| Status::invalid_argument(format!("uid: {e}")))
}

/// Parses the UID of a request, which is empty for all pods.
pub(crate) fn parsed_uid(text: &str) -> Result<Option<PodUid>, Status> {
    if text.is_empty() { Ok(None) } else { pod_uid(text).map(Some) }
}

#[tonic::async_trait]
impl Pleg for PlegService {
    type WatchStream = Bounded<pb::WatchEvent>;
    type LifecycleStream = Bounded<pb::LifecycleEvent>;

    async fn watch(&self, request: Request<pb::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let resume = request.into_inner().resume.map(Cursor::from);
        let stream = self.core.readers.watch(resume).take_until(self.stop.clone().cancelled_owned());
        Ok(Response::new(Bounded::new("Pleg.Watch", stream)))
    }

    async fn observe(
        &self,
        request: Request<pb::ObserveRequest>,
    ) -> Result<Response<pb::ObserveReply>, Status> {
        let span = tracing::info_span!("Observe", k8s.pod.uid = request.get_ref().uid);
        let request = request.into_inner();
        let inspected = async move {
            let uid = pod_uid(&request.uid)?;
            // The IDs of the entry replace a list.
            let knows = !(request.sandboxes.is_empty() && request.containers.is_empty());
            let complete = knows && !request.full;
            let inspection = InspectionRequest {
                sandboxes: request.sandboxes.into_iter().filter(|id| !id.is_empty()).collect(),
                containers: request
                    .containers
                    .into_iter()
                    .filter(|c| !c.id.is_empty())
                    .map(|c| (c.id, c.sandbox_id))
                    .collect(),
                complete,
                ids: request.ids.into_iter().filter(|id| !id.is_empty()).collect(),
                // Before the first full list there is no entry to replace a list.
                list: request.full || !self.core.store.is_primed(),
                trace: propagate::current_trace(),
                ..InspectionRequest::default()
            };
            let answer = self.core.inspect(&uid, inspection).await;
            match answer {
                Ok(Ok((pod, cursor))) => Ok(Response::new(pb::ObserveReply {
                    pod: pod.map(|p| p.as_ref().into()),
                    cursor: Some(cursor.into()),
                })),
                Ok(Err(error)) => Err(Status::unavailable(error.to_string())),
                Err(_) => Err(Status::unavailable("the service is stopping")),
            }
        };
        let reply = inspected.instrument(span.clone()).await;
        propagate::record_status(&span, &reply);
        reply
    }

    async fn lifecycle(
        &self,
        request: Request<pb::LifecycleRequest>,
    ) -> Result<Response<Self::LifecycleStream>, Status> {
        let uid = parsed_uid(&request.into_inner().uid)?;
        let stream = self.core.readers.events(uid).take_until(self.stop.clone().cancelled_owned());
        Ok(Response::new(Bounded::new("Pleg.Lifecycle", stream)))
    }

    async fn health(&self, _: Request<pb::HealthRequest>) -> Result<Response<pb::HealthReply>, Status> {
        let age = self.core.last_list_age();
        let problem = health::problem(age, self.core.periods.threshold);
        let hints = *self.core.hints.borrow();
        Ok(Response::new(pb::HealthReply {
            healthy: problem.is_none(),
            message: problem.unwrap_or_default(),
            last_list_age_seconds: age.map(|a: Duration| a.as_secs_f64()),
            hint_source: hints.source.to_owned(),
            hints_live: hints.live,
            relist_period_seconds: self.core.relist_period().as_secs_f64(),
            epoch: self.core.store.epoch(),
            pods: u32::try_from(self.core.store.len()).unwrap_or(u32::MAX),
            oldest_inspection_seconds: self.core.oldest_inspection().map(|a| a.as_secs_f64()),
        }))
    }
}
