//! Prepares the claims of a pod before its sandbox, and unprepares them after its containers.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, Pod};
use pod_sync_claims::{ClaimError, has_claims};
use pod_sync_clients::EventType;
use pod_sync_cri_config::container::DeviceAdditions;
use pod_sync_decisions::waiting::Waiting;
use quintlet_model::ids::PodUid;

use super::halt::Halt;
use super::pass::Pass;
use super::prepare::Preparation;
use super::resources::runs;
use super::retries::{ERROR_WAIT, jitter};
use super::terminate::Termination;
use crate::context::{PodEnvironment, Reporting, WorkerControl};

/// Event reason for claims that cannot be prepared (`pkg/kubelet/events`).
const FAILED: &str = "FailedPrepareDynamicResources";

impl Preparation<'_> {
    /// Prepares the claims of the pod: before each sandbox, since the machine may have restarted, and before
    /// a container if the record does not have them.
    pub(super) async fn prepare_claims(&mut self, pod: &Pod, is_new_sandbox: bool) -> Result<(), Halt> {
        let claims = &self.environment.claims;
        let uid = &self.tracker.pod_ref.uid;
        if !has_claims(pod) || (!is_new_sandbox && claims.has_devices(uid, pod)) {
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

/// The claims of a pod that rests.
pub(super) enum RunningClaims {
    /// The record has all of them, or the pod has none.
    Recorded,
    /// They were not recorded, and now are.
    Restored,
    /// They are not recorded, and the next attempt is due after this time.
    Missing(Duration),
}

impl Preparation<'_> {
    /// Records and prepares the claims of a pod that runs, if no checkpoint has them. Nothing else of the pod
    /// waits for that.
    ///
    /// # Errors
    /// The pass is cancelled.
    pub(super) async fn restore_claims(&mut self, pass: &Pass) -> Result<RunningClaims, Halt> {
        let claims = &self.environment.claims;
        let is_recorded = !has_claims(&pass.pod) || claims.has_devices(&self.tracker.pod_ref.uid, &pass.pod);
        if is_recorded || !runs(&pass.runtime) {
            return Ok(RunningClaims::Recorded);
        }
        let wait = self.retries.claims.saturating_sub(self.clock.boot());
        if !wait.is_zero() {
            self.tracker.view.keep_waiting();
            return Ok(RunningClaims::Missing(wait));
        }
        match self.prepare_claims(&pass.pod, false).await {
            Ok(()) => Ok(RunningClaims::Restored),
            Err(Halt::Failed { waiting, error, .. }) => {
                tracing::warn!(pod.uid = %self.tracker.pod_ref.uid, error, "claims of a running pod not recorded, retrying");
                let wait = jitter(ERROR_WAIT);
                self.retries.claims = self.clock.boot().saturating_add(wait);
                self.tracker.view.wait_for(waiting, Some(self.retries.claims));
                Ok(RunningClaims::Missing(wait))
            }
            Err(halt) => Err(halt),
        }
    }
}

impl Termination<'_> {
    /// Unprepares the claims of the pod, whose containers have ended. Without a usable checkpoint, the claims
    /// of this pod are recorded first if it has run, and those of the others are left to them.
    pub(super) async fn unprepare_claims(&mut self, pass: &Pass) -> Result<(), Halt> {
        let (claims, uid) = (&self.environment.claims, self.tracker.pod_ref.uid.clone());
        let failed = |error: String| Halt::failed(Waiting::ClaimsUnpreparing { error: error.clone() }, error);
        let mut others = Vec::new();
        let is_in_doubt = claims.lacks_pods() && (has_claims(&pass.pod) || claims.holds_any(&uid));
        if is_in_doubt {
            let Some(pods) = possible_users(self.reporting, self.control) else {
                return Err(failed("the pods of this node are not all known yet".to_owned()));
            };
            others = pods;
            let termination = self.tracker.record.termination.as_ref();
            let is_released = termination.is_some_and(|termination| termination.claims_released);
            let has_run = !pass.runtime.sandboxes.is_empty() || !pass.runtime.containers.is_empty();
            if has_run && !is_released {
                claims.recover(&uid, &pass.pod).await.map_err(|error| failed(error.to_string()))?;
            }
        }
        claims.unprepare(&uid, &others).await.map_err(|error| failed(error.to_string()))?;
        if is_in_doubt {
            self.tracker.record.update(|record| {
                if let Some(termination) = record.termination.as_mut() {
                    termination.claims_released = true;
                }
            });
        }
        Ok(())
    }
}

/// Returns the pods that have not ended, which may use claims without a record. None until all are known.
#[must_use]
pub fn possible_users(reporting: &Reporting, control: &WorkerControl) -> Option<Vec<Arc<Pod>>> {
    let views = &reporting.views;
    if !views.is_complete() {
        return None;
    }
    let all = views.all().into_iter();
    let running = all.filter(|view| !control.pod_workers.has_terminated(views, &view.pod_ref.uid));
    Some(running.map(|view| Arc::clone(&view.pod)).collect())
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
