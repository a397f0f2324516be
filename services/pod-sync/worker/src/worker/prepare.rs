//! Prepares a pod before its containers start: cgroup, directories, volumes, runtime handler and pull
//! secrets.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use pod_sync_clients::EventType;
use pod_sync_decisions::status::{ATTACHMENT_LIMIT, KillCause};
use pod_sync_decisions::worker::Input;
use pod_sync_decisions::{sync, waiting};
use pod_sync_direct_volumes::VolumeContext;
use pod_sync_direct_volumes::certificates::TrustAnchors;
use pod_sync_direct_volumes::error::VolumeFailure;
use pod_sync_layout::{ObjectError, TokenSource};
use pod_sync_metrics::CgroupOperation;
use pod_sync_records::UserNamespaceError;
use pod_sync_volume_manager::{Again, NotReady};
use quintlet_kit::clock::Clock;
use quintlet_kit::task::blocking;
use tokio_util::sync::CancellationToken;

use super::cancellable::Cancellable;
use super::halt::Halt;
use super::pass::Pass;
use super::reject::terminate_rejected;
use super::retries::{RetryTimes, jitter};
use super::sandbox::no_sandbox;
use super::setup::{PodSetup, VolumeRefresh};
use super::tracker::Tracker;
use crate::context::{Checkpoints, NodeConfig, PodEnvironment, Reporting, RuntimeAccess, WorkerControl};

/// Prepares one pod.
pub(super) struct Preparation<'a> {
    pub(super) clock: &'a Clock,
    pub(super) node: &'a Arc<NodeConfig>,
    pub(super) runtime: &'a RuntimeAccess,
    pub(super) reporting: &'a Reporting,
    pub(super) checkpoints: &'a Checkpoints,
    pub(super) environment: &'a Arc<PodEnvironment>,
    pub(super) control: &'a WorkerControl,
    /// Ends the sync, unless it has reached the runtime.
    pub(super) cancel: &'a CancellationToken,
    pub(super) tracker: &'a mut Tracker,
    pub(super) retries: &'a mut RetryTimes,
    pub(super) setup: &'a mut PodSetup,
}

impl Preparation<'_> {
    /// Creates the cgroup and sets up the volumes. An existing cgroup is not changed.
    pub(super) async fn prepare(&mut self, pass: &Pass) -> Result<(), Halt> {
        let pod = &pass.pod;
        let uid = self.tracker.pod_ref.uid.clone();
        // An existing cgroup has the values of its creation or of the last resize.
        let exists = self.has_cgroup(pod).await && !self.tracker.record.limiting;
        if sync::cgroup_plan(pod, exists, &pass.runtime).ensure {
            self.tracker.record.update(|record| record.limiting = true);
            let cgroups = self.environment.pod_cgroups(&uid);
            let (wanted, owner) = (Arc::clone(pod), uid.clone());
            let began = self.clock.boot();
            let ensured = blocking(move || cgroups.ensure_with_values(&wanted, &owner)).await;
            let took = self.clock.boot().saturating_sub(began);
            self.reporting.metrics.operations.cgroup(CgroupOperation::Create, took);
            if let Err(e) = ensured {
                let text = format!("unable to ensure pod container exists: {e}");
                self.reporting.events.pod(pod, EventType::Warning, "FailedCreatePodContainer", &text, "");
                return Err(Halt::failed(waiting::Waiting::Cgroup { message: e.to_string() }, text));
            }
            self.checkpoints.allocations.actuate_pod(&uid, quintlet_model::pod::spec(pod).resources.clone());
            self.tracker.record.update(|record| record.limiting = false);
        }
        let unmounted: Vec<String> =
            quintlet_model::pod::spec(pod).volumes.iter().flatten().map(|v| v.name.clone()).collect();
        if !unmounted.is_empty() {
            self.tracker.view.meanwhile(waiting::Waiting::Volumes { unmounted, error: None });
        }
        let (tasks, cancel) = (self.environment.volume_tasks.clone(), self.cancel.clone());
        // The drivers work while the direct volumes are set up.
        tasks.declare(pod, &uid, &cancel).await;
        let changes = self.environment.volume_changes(&uid);
        self.retries.failed_with = Some(changes);
        let again = self.retries.volumes.max(self.volumes_due(pod, changes));
        // A retry sets up what failed only.
        self.retries.volumes = Again::None;
        if again > Again::None {
            self.setup.refreshed = Some(VolumeRefresh::of(pod, changes, self.clock.boot()));
        }
        let failures = tasks.set_up(pod, &uid, &self.volume_context(), again, &cancel).await;
        if cancel.is_cancelled() {
            self.retries.volumes = Again::All;
            return Err(Halt::Cancelled);
        }
        let failures = match failures {
            Ok(failures) => failures,
            Err(e) => return Err(self.no_directories(pod, &e)),
        };
        self.failed_mounts(pod, &failures);
        let show = |unmounted, error| {
            self.tracker.view.meanwhile(waiting::Waiting::Volumes { unmounted, error });
            self.tracker.report_volume_health();
        };
        match tasks.wait(pod, &uid, &cancel, show).await {
            Ok(mounted) => self.setup.volumes = Some(mounted),
            Err(_) if cancel.is_cancelled() => return Err(Halt::Cancelled),
            Err(NotReady { text, limit_exceeded: true, .. }) => {
                return Err(self.over_attachment_limit(pod, &text));
            }
            Err(NotReady { unmounted, text, error, retry_after, limit_exceeded: false }) => {
                let error = Some(error.unwrap_or_else(|| text.clone()));
                let waiting = waiting::Waiting::Volumes { unmounted, error };
                let wait = retry_after.unwrap_or_else(|| self.retries.mounts.next_wait());
                return Err(Halt::failed(waiting, text).after(jitter(wait)));
            }
        }
        self.retries.volumes_mounted();
        if !failures.is_empty() {
            // Volumes that keep their old content.
            self.schedule_refresh();
        }
        self.fetch_pull_secrets(pod).await;
        if self.cancel.is_cancelled() { Err(Halt::Cancelled) } else { Ok(()) }
    }

    /// Returns which direct volumes may be outdated.
    fn volumes_due(&self, pod: &Pod, changes: u64) -> Again {
        let (now, interval) = (self.clock.boot(), self.node.sync_frequency);
        let last = self.setup.refreshed.as_ref();
        last.map_or(Again::Changed, |last| last.due(pod, changes, now, interval))
    }

    /// Terminates a pod whose volumes cannot be attached to this node.
    fn over_attachment_limit(&self, pod: &Pod, message: &str) -> Halt {
        self.reporting.metrics.pod_rejected(ATTACHMENT_LIMIT);
        let (reporting, control) = (self.reporting, self.control);
        terminate_rejected(reporting, control, self.tracker, pod, KillCause::AttachmentLimit, message)
    }

    /// Resolves the runtime handler of the pod's RuntimeClass and its user namespace mappings.
    pub(super) async fn resolve(&mut self, pod: &Pod) -> Result<(), Halt> {
        let spec = quintlet_model::pod::spec(pod);
        self.setup.runtime_handler = match spec.runtime_class_name.as_deref().unwrap_or_default() {
            "" => String::new(),
            class => match self.environment.objects.runtime_handler(class).await {
                Ok(handler) => handler,
                Err(e @ ObjectError::NotReady { .. }) => {
                    self.tracker.view.wait_for(waiting::Waiting::Service { name: "API server" }, None);
                    return Err(Halt::Interrupted(e.to_string()));
                }
                Err(e) => {
                    return Err(no_sandbox(
                        self.reporting,
                        &self.tracker.pod_ref,
                        pod,
                        "Failed to create sandbox",
                        &e.to_string(),
                    ));
                }
            },
        };
        // Features that the handler lacks are rejected when the configuration is built.
        self.setup.user_namespace = None;
        if spec.host_users == Some(false)
            && self.runtime.features(&self.setup.runtime_handler).user_namespaces
        {
            let (environment, uid) = (Arc::clone(self.environment), self.tracker.pod_ref.uid.clone());
            let releases = environment.user_namespaces.releases();
            self.retries.without_range = None;
            self.setup.user_namespace =
                match blocking(move || environment.user_namespaces.mappings(&uid)).await {
                    Ok(mapped) => Some(mapped),
                    Err(e) => {
                        if matches!(e, UserNamespaceError::Exhausted { .. }) {
                            self.retries.without_range = Some(releases);
                        }
                        return Err(no_sandbox(
                            self.reporting,
                            &self.tracker.pod_ref,
                            pod,
                            "Failed to generate sandbox config",
                            &e.to_string(),
                        ));
                    }
                };
        }
        Ok(())
    }

    // A pull may succeed without a secret, so missing ones are reported once a pull has failed.
    async fn fetch_pull_secrets(&mut self, pod: &Pod) {
        let names = quintlet_model::pod::spec(pod).image_pull_secrets.iter().flatten();
        let (mut found, mut missing) = (Vec::new(), Vec::new());
        let objects = self.volume_context().objects;
        for name in names.map(|s| s.name.as_str()).filter(|n| !n.is_empty()) {
            match objects.secret(&self.tracker.pod_ref.namespace, name).await {
                Ok(secret) => found.push(secret),
                Err(e) => {
                    tracing::info!(pod.uid = %self.tracker.pod_ref.uid, secret = name, error = %e, "failed to get image pull secret");
                    missing.push(name.to_owned());
                }
            }
        }
        self.setup.pull_secrets = found;
        self.setup.missing_pull_secrets = missing;
    }

    /// Returns whether containers run outside of the pod's cgroup, and thus without its limits.
    pub(super) async fn has_lost_cgroup(&self, pass: &Pass) -> bool {
        let exists = self.has_cgroup(&pass.pod).await;
        let is_lost = sync::cgroup_plan(&pass.pod, exists, &pass.runtime).kill_first;
        if is_lost {
            let (name, uid) = (self.tracker.name(), &self.tracker.pod_ref.uid);
            tracing::warn!(pod.name = name, pod.uid = %uid, "pod cgroup is missing, killing its containers");
        }
        is_lost
    }

    async fn has_cgroup(&self, pod: &Arc<Pod>) -> bool {
        let cgroups = self.environment.cgroups.clone();
        let (pod, uid) = (Arc::clone(pod), self.tracker.pod_ref.uid.clone());
        blocking(move || cgroups.exists(&pod, &uid)).await
    }

    fn volume_context(&self) -> VolumeContext {
        let cancel = self.cancel;
        let objects = Cancellable { inner: Arc::clone(&self.environment.objects), cancel: cancel.clone() };
        let tokens = self
            .environment
            .tokens
            .clone()
            .map(|inner| Arc::new(Cancellable { inner, cancel: cancel.clone() }) as Arc<dyn TokenSource>);
        let trust_anchors =
            self.environment.trust_anchors.clone().map(|inner| {
                Arc::new(Cancellable { inner, cancel: cancel.clone() }) as Arc<dyn TrustAnchors>
            });
        VolumeContext {
            objects: Arc::new(objects),
            tokens,
            trust_anchors,
            node: Arc::clone(&self.node.settings),
            now: self.clock.wall(),
        }
    }

    fn failed_mounts(&self, pod: &Pod, failures: &[VolumeFailure]) {
        if self.cancel.is_cancelled() {
            // A cancelled set-up is not a failure.
            return;
        }
        for failure in failures {
            self.reporting.events.pod(pod, EventType::Warning, "FailedMount", &failure.to_string(), "");
        }
    }

    fn no_directories(&mut self, pod: &Pod, e: &io::Error) -> Halt {
        let message = format!("error making pod data directories: {e}");
        self.reporting.events.pod(pod, EventType::Warning, "Failed", &message, "");
        let waiting = waiting::Waiting::DataDirs { message: message.clone() };
        Halt::failed(waiting, message).after(jitter(self.retries.mounts.next_wait()))
    }

    /// Declares volumes of drivers again, and refreshes files of ConfigMaps, Secrets, tokens and the downward
    /// API. A failure leaves the old content. Returns the time until a failed refresh is due.
    pub(super) async fn refresh_volumes(&mut self, pass: &Pass) -> Option<Duration> {
        let pod = &pass.pod;
        let changes = self.environment.volume_changes(&self.tracker.pod_ref.uid);
        let again = self.volumes_due(pod, changes);
        let tasks = self.environment.volume_tasks.clone();
        tasks.refresh(pod, &self.tracker.pod_ref.uid, again > Again::None);
        let now = self.clock.boot();
        let is_retry = self.setup.refresh_retry.is_some_and(|at| at <= now);
        if again > Again::None || is_retry {
            if again > Again::None {
                self.setup.refreshed = Some(VolumeRefresh::of(pod, changes, now));
            }
            let (uid, cancel) = (&self.tracker.pod_ref.uid, self.cancel);
            let failed = tasks.refresh_direct(pod, uid, again, || self.volume_context(), cancel).await;
            if cancel.is_cancelled() {
                // Reads were given up.
                self.setup.refreshed = None;
            }
            self.failed_mounts(pod, &failed);
            self.schedule_refresh();
        }
        self.setup.refresh_retry.map(|at| at.saturating_sub(self.clock.boot()))
    }

    fn schedule_refresh(&mut self) {
        let wait = self.environment.volume_tasks.direct_wait(&self.tracker.pod_ref.uid).map(jitter);
        self.setup.refresh_retry = wait.map(|wait| self.clock.boot().saturating_add(wait));
    }

    /// From here on, the pass can no longer be cancelled.
    pub(super) fn enter_runtime(&self) -> Result<(), Halt> {
        self.control.pod_workers.step(Input::RuntimeReached(self.tracker.pod_ref.uid.clone()));
        if self.cancel.is_cancelled() { Err(Halt::Cancelled) } else { Ok(()) }
    }
}
