//! Prepares the claims of a pod before its sandbox, and unprepares them after its containers.

use k8s_openapi::api::core::v1::{Container, Pod};
use pod_sync_claims::{ClaimError, has_claims};
use pod_sync_clients::EventType;
use pod_sync_cri_config::container::DeviceAdditions;
use pod_sync_decisions::waiting::Waiting;
use quintlet_model::ids::PodUid;

use super::halt::Halt;
use super::prepare::Preparation;
use crate::context::PodEnvironment;

/// Event reason for claims that cannot be prepared (`pkg/kubelet/events`).
const FAILED: &str = "FailedPrepareDynamicResources";

impl Preparation<'_> {
    /// Prepares the claims of the pod: before each sandbox, since the machine may have restarted, and before
    /// a container if the record does not have them.
    pub(super) async fn prepare_claims(&mut self, pod: &Pod, is_new_sandbox: bool) -> Result<(), Halt> {
        let claims = &self.environment.claims;
        let uid = &self.tracker.pod_ref.uid;
        if !has_claims(pod) || (!is_new_sandbox && claims.holds_all(uid, pod)) {
            return Ok(());
        }
        let uid = uid.clone();
        let mut operations = claims.operations();
        let mut prepare = std::pin::pin!(claims.prepare(&uid, pod, self.cancel));
        let mut described = None;
        let prepared = loop {
            // The drivers are known once their calls begin.
            let description = claims.describe(pod);
            if described.as_ref() != Some(&description) {
                let waiting = Waiting::Claims { claims: description.clone(), error: None };
                self.tracker.view.meanwhile(waiting);
                described = Some(description);
            }
            // Dropping the wait for an operation loses nothing.
            tokio::select! {
                prepared = &mut prepare => break prepared,
                Ok(()) = operations.changed() => {}
            }
        };
        match prepared {
            Ok(()) => Ok(()),
            Err(ClaimError::Ending) => Err(Halt::Cancelled),
            Err(error) => {
                let message = error.prepare_message();
                self.reporting.events.pod(pod, EventType::Warning, FAILED, &message, "");
                let waiting =
                    Waiting::Claims { claims: claims.describe(pod), error: Some(error.to_string()) };
                Err(Halt::failed(waiting, message))
            }
        }
    }
}

/// Adds the CDI devices of the container's claims before those of its device plugins, each once.
pub(super) fn add_claims(
    environment: &PodEnvironment,
    uid: &PodUid,
    pod: &Pod,
    container: &Container,
    additions: &mut DeviceAdditions,
) -> Result<(), ClaimError> {
    let mut names = environment.claims.cdi_devices(uid, pod, container)?;
    let others = std::mem::take(&mut additions.cdi_devices).into_iter();
    let others: Vec<String> = others.filter(|name| !names.contains(name)).collect();
    names.extend(others);
    additions.cdi_devices = names;
    Ok(())
}

/// Unprepares the claims of a pod whose containers have ended.
pub(super) async fn unprepare_claims(environment: &PodEnvironment, uid: &PodUid) -> Result<(), Halt> {
    let unprepared = environment.claims.unprepare(uid).await;
    unprepared.map_err(|error| Halt::failed(Waiting::ClaimsUnpreparing { error: error.to_string() }, error))
}
