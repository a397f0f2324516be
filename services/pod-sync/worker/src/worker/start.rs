//! Starts containers in a sandbox (`pkg/kubelet/kuberuntime: startContainer`).

use std::net::IpAddr;

use k8s_cri::v1 as cri;
use k8s_openapi::api::core::v1::{Container, Pod};
use pod_sync_clients::{CallError, EventType};
use pod_sync_cri_config::container::{ContainerInput, container_config};
use pod_sync_cri_config::cri_extensions::{CriExtensions, ImageMount};
use pod_sync_cri_config::env::{EnvInput, EnvObjects, make_env};
use pod_sync_cri_config::error::ConfigError;
use pod_sync_cri_config::mounts::block_devices;
use pod_sync_cri_config::security::ImageUser;
use pod_sync_cri_config::{cri_extensions, paths};
use pod_sync_decisions::backoff::BackoffDelays;
use pod_sync_decisions::container_status::WaitingReason;
use pod_sync_decisions::waiting::{StartFailure, Waiting};
use pod_sync_decisions::{backoff, sync as decide_sync};
use quintlet_kit::failpoint;
use quintlet_kit::task::blocking;
use quintlet_model::hash::container_hash;
use quintlet_model::ids::{ContainerId, SandboxId};
use quintlet_model::outcome::Outcome;
use quintlet_model::pod as pods;
use quintlet_model::runtime::{ContainerState, PodRuntime};

use super::pending_starts::ContainerKind;
use super::{Halt, Pass, Worker};
use crate::image;
use crate::image::NoImage;

const CREATE: &str = "CreateContainer";
const START: &str = "StartContainer";

/// A container did not start.
#[derive(Debug)]
pub(super) enum NotStarted {
    /// The container waits with this reason.
    Waits(WaitingReason),
    /// Termination of the pod was requested during the pass.
    Ends,
    /// The whole pass ends.
    Halt(Halt),
}

impl From<Halt> for NotStarted {
    fn from(halt: Halt) -> Self {
        Self::Halt(halt)
    }
}

fn waits(reason: StartFailure, message: impl Into<String>) -> NotStarted {
    NotStarted::Waits(reason.with_message(message))
}

/// Returns the container whose process namespace an ephemeral container joins, if it names one (`targetContainerName`).
fn target<'a>(
    pod: &Pod,
    container: &Container,
    runtime: &'a PodRuntime,
) -> Result<Option<&'a ContainerId>, ConfigError> {
    let ephemeral = pods::spec(pod).ephemeral_containers.iter().flatten().find(|e| e.name == container.name);
    let name = ephemeral.and_then(|e| e.target_container_name.as_deref()).filter(|name| !name.is_empty());
    let Some(name) = name else { return Ok(None) };
    match runtime.newest(name) {
        Some(instance) => Ok(Some(&instance.id)),
        None => Err(ConfigError::invalid(format!("unable to find target container {name}"))),
    }
}

impl Worker {
    pub(super) async fn start_container(
        &mut self,
        pass: &Pass,
        kind: ContainerKind,
        container: &Container,
        sandbox: &SandboxId,
        sandbox_config: &cri::PodSandboxConfig,
        ips: &[IpAddr],
    ) -> Result<(), NotStarted> {
        let pod = &pass.pod;
        let field_path = kind.field_path(&container.name);
        let newest = pass.runtime.newest(&container.name);
        // A container that was created and not started is started and not created again. That includes one whose last start has an
        // unknown outcome: the runtime may start it yet, and two instances must not run.
        let hash = container_hash(&container.name, container.image.as_deref().unwrap_or_default());
        let made = newest.filter(|c| {
            c.state == ContainerState::Created
                && c.sandbox_id == *sandbox
                && c.hash() == hash
                && (!self.record.waiting.contains_key(&container.name)
                    || self.retries.unknown_calls.contains(&container.name, START, c.id.as_str()))
        });
        let reused = made.is_some();
        let (id, restarts) = match made {
            Some(c) => (c.id.clone(), c.restart_count()),
            None => self.make_container(pass, kind, container, sandbox, sandbox_config, ips).await?,
        };
        self.unless_ending()?;
        // Recorded before the start: an interrupted start may end an instance that never ran.
        self.record.starting.insert(container.name.clone(), id.to_string());
        if container.lifecycle.as_ref().is_some_and(|l| l.post_start.is_some()) {
            self.record.post_starts.insert(id.to_string(), None);
        }
        self.save();
        if let Err(e) = self.ctx.runtime.calls.start_container(&id).await {
            // The refused start of an instance that an interrupted pass left: its first start may be in progress in the runtime or
            // have ended, or containerd finished its creation without the sandbox's namespaces. The container is not at fault.
            // The next pass creates an instance that has ended again.
            if e.is_refused_by_runtime() && reused && !self.has_repeated(&e, &container.name, id.as_str()) {
                return Err(Halt::Interrupted(format!("failed to start the existing instance: {e}")).into());
            }
            if e.is_refused_by_runtime() {
                self.record.starting.remove(&container.name);
                self.record.post_starts.remove(id.as_str());
            }
            let object = id.to_string();
            return Err(self.not_started(
                pod,
                container,
                &object,
                &field_path,
                &e,
                StartFailure::RunContainerError,
            ));
        }
        self.retries.unknown_calls.settled(&container.name, START);
        self.record.starting.remove(&container.name);
        self.ctx.reporting.events.pod(pod, EventType::Normal, "Started", "Container started", &field_path);
        self.link_log(container, &id, restarts).await;
        self.post_start(pod, container, &id, ips, &field_path).await
    }

    /// Removes instances whose start was interrupted before they ran: containerd aborts a start when its caller's connection
    /// breaks. They are created again with the same attempt. Returns whether there were any.
    pub(super) async fn remove_interrupted_starts(&mut self, pass: &Pass) -> Result<bool, Halt> {
        let never_ran: Vec<_> = pass
            .runtime
            .containers
            .iter()
            .filter(|c| self.record.starting.get(&c.name).is_some_and(|id| id == c.id.as_str()))
            .filter(|c| c.state == ContainerState::Exited && c.started_unix_ns <= 0)
            .cloned()
            .collect();
        let mut forgotten = false;
        for instance in &never_ran {
            tracing::info!(pod.uid = %self.pod_ref.uid, container.id = %instance.id, "removing container whose start was interrupted");
            // containerd 1.6 may keep the task of such a start, and then refuses to remove the container. The next instance is
            // created beside it, with the next attempt.
            let removed = self.remove_container(&pass.pod, &pass.runtime, &instance.id, true).await;
            forgotten |= self.tolerate_refusal(removed)?;
            self.record.starting.remove(&instance.name);
        }
        // The note is obsolete once the instance has left the state Created.
        self.record.starting.retain(|name, id| {
            pass.runtime
                .newest(name)
                .is_some_and(|c| c.id.as_str() == id && c.state == ContainerState::Created)
        });
        if forgotten {
            self.acted();
        }
        Ok(forgotten)
    }

    fn unless_ending(&self) -> Result<(), NotStarted> {
        if self.is_ending() { Err(NotStarted::Ends) } else { Ok(()) }
    }

    async fn make_container(
        &mut self,
        pass: &Pass,
        kind: ContainerKind,
        container: &Container,
        sandbox: &SandboxId,
        sandbox_config: &cri::PodSandboxConfig,
        ips: &[IpAddr],
    ) -> Result<(ContainerId, u32), NotStarted> {
        let pod = &pass.pod;
        let field_path = kind.field_path(&container.name);
        let newer = match self.newer_config(container) {
            Ok(newer) => newer,
            Err(reason) => {
                let text = format!("Error: {}", reason.reason);
                self.ctx.reporting.events.pod(pod, EventType::Warning, "Failed", &text, &field_path);
                return Err(NotStarted::Waits(reason));
            }
        };
        self.meanwhile(Waiting::ContainerCreating { container: container.name.clone() });
        let mut pulls = self.record.pulls.clone();
        let (ctx, secrets) = (self.ctx.pulling(), self.setup.pull_secrets.clone());
        let wanted = image::Wanted {
            pod,
            image: container.image.as_deref().unwrap_or_default(),
            policy: container.image_pull_policy.as_deref().unwrap_or("IfNotPresent"),
            field_path: &field_path,
            secrets: &secrets,
            sandbox_config,
        };
        let begins = || {
            let (container, image) = (container.name.clone(), wanted.image.to_owned());
            self.meanwhile(Waiting::ImagePulling { container, image });
            self.report_sandbox_ready();
        };
        let ready = image::ensure(&ctx, wanted, &mut pulls, begins).await;
        self.record.pulls = pulls;
        let ready = match ready {
            Ok(ready) => ready,
            Err(NoImage::Waits(reason)) => {
                self.ctx.reporting.events.pod(
                    pod,
                    EventType::Warning,
                    "Failed",
                    &format!("Error: {}", reason.reason),
                    &field_path,
                );
                return Err(NotStarted::Waits(reason));
            }
            Err(NoImage::Interrupted(e)) => {
                let image = container.image.as_deref().unwrap_or_default();
                let Some(reason) = self.image_failure(&e, &container.name, image) else {
                    return Err(Halt::interrupted(&e).into());
                };
                let text = format!("Error: {}", reason.reason);
                self.ctx.reporting.events.pod(pod, EventType::Warning, "Failed", &text, &field_path);
                return Err(NotStarted::Waits(reason));
            }
        };
        // The pull may have taken minutes.
        self.unless_ending()?;
        self.meanwhile(Waiting::ContainerCreating { container: container.name.clone() });
        let restarts = self.next_attempt(pass, &container.name).await;
        let config = match self.container_config(pass, container, restarts, &ready, ips).await {
            Ok(config) => config,
            Err(e) => {
                self.ctx.reporting.events.pod(
                    pod,
                    EventType::Warning,
                    "Failed",
                    &format!("Error: {e}"),
                    &field_path,
                );
                return Err(waits(StartFailure::CreateContainerConfigError, e.to_string()));
            }
        };
        // Recorded before the creation, so that a restarted pod-sync keeps the same delay.
        if let Some(exited) = backoff::last_exit(&pass.runtime, &container.name) {
            let key = backoff::crash_loop_key(&self.pod_ref, container);
            let (wall, boot) = (self.ctx.clock.wall(), self.ctx.clock.boot());
            let ago = self.record.crash_loop.finished_ago(&key, exited, wall, boot);
            self.record.crash_loop.record_restart(&key, ago, boot, self.ctx.node.crash_loop);
        }
        self.save();
        if kind != ContainerKind::Ephemeral {
            let resources = container.resources.clone().unwrap_or_default();
            self.ctx.checkpoints.allocations.actuate(&self.pod_ref.uid, &container.name, resources);
        }
        match self.ctx.runtime.calls.create_container(sandbox, config, &newer, sandbox_config.clone()).await {
            Ok(id) => {
                self.retries.unknown_calls.settled(&container.name, CREATE);
                self.observed.freshness.container_created(&id, sandbox);
                self.ctx.reporting.events.pod(
                    pod,
                    EventType::Normal,
                    "Created",
                    "Container created",
                    &field_path,
                );
                Ok((id, restarts))
            }
            Err(e) => {
                let reason = StartFailure::CreateContainerError;
                Err(self.not_started(pod, container, sandbox.as_str(), &field_path, &e, reason))
            }
        }
    }

    // Returns the image volumes and the stop signal of a container, or the reason why an image volume is missing.
    fn newer_config(&self, container: &Container) -> Result<CriExtensions, WaitingReason> {
        // Each volume mount of the spec is one mount of the request, in the same order. The mounts that pod-sync adds follow.
        let mounts = container.volume_mounts.iter().flatten().enumerate();
        let mounts = mounts.filter_map(|(place, m)| Some((place, m, self.setup.image_volumes.get(&m.name)?)));
        let ids = self.setup.user_namespace.as_ref();
        let mounts = mounts.map(|(place, mount, image)| {
            let mount = ImageMount {
                container_path: mount.mount_path.clone(),
                readonly: true,
                uid_mappings: ids.map(|ids| ids.uids.clone()).unwrap_or_default(),
                gid_mappings: ids.map(|ids| ids.gids.clone()).unwrap_or_default(),
                image: Some(image.clone()?),
                image_sub_path: mount.sub_path.clone().unwrap_or_default(),
            };
            Ok((place, mount))
        });
        Ok(CriExtensions {
            mounts: mounts.collect::<Result<_, _>>()?,
            stop_signal: cri_extensions::stop_signal(container),
        })
    }

    /// Pulls the images of the image volumes that these containers mount. The containers wait with the reason of a failure.
    pub(super) async fn ensure_image_volumes(
        &mut self,
        pod: &Pod,
        containers: &[&Container],
        sandbox_config: &cri::PodSandboxConfig,
    ) -> Result<(), Halt> {
        self.setup.image_volumes.clear();
        let mounted =
            |name: &str| containers.iter().any(|c| c.volume_mounts.iter().flatten().any(|m| m.name == name));
        let volumes = pods::spec(pod).volumes.iter().flatten().filter(|v| mounted(&v.name));
        for (name, source) in volumes.filter_map(|v| Some((&v.name, v.image.as_ref()?))) {
            let (ctx, secrets) = (self.ctx.pulling(), self.setup.pull_secrets.clone());
            let wanted = image::Wanted {
                pod,
                image: source.reference.as_deref().unwrap_or_default(),
                policy: source.pull_policy.as_deref().unwrap_or("IfNotPresent"),
                field_path: "",
                secrets: &secrets,
                sandbox_config,
            };
            let mut pulls = self.record.pulls.clone();
            let ready = image::ensure(&ctx, wanted, &mut pulls, || self.report_sandbox_ready()).await;
            self.record.pulls = pulls;
            let ready = match ready {
                Ok(ready) => Ok(cri::ImageSpec {
                    image: ready.image_ref,
                    user_specified_image: wanted.image.to_owned(),
                    runtime_handler: self.setup.runtime_handler.clone(),
                    annotations: pod.metadata.annotations.clone().unwrap_or_default().into_iter().collect(),
                }),
                Err(NoImage::Waits(reason)) => Err(reason),
                // The containers that mount the volume wait with this reason.
                Err(NoImage::Interrupted(e)) => match self.image_failure(&e, name, wanted.image) {
                    Some(reason) => Err(reason),
                    None => return Err(Halt::interrupted(&e)),
                },
            };
            self.setup.image_volumes.insert(name.clone(), ready);
        }
        Ok(())
    }

    /// Returns whether an unsuccessful call counts as a failure of `container`, with a reason and a back-off: the runtime
    /// refused it, or its outcome stays unknown.
    pub(super) fn is_failure(&mut self, e: &CallError, container: &str, object: &str) -> bool {
        match e.outcome {
            Outcome::Ok | Outcome::NotDispatched => false,
            Outcome::RuntimeError => {
                self.retries.unknown_calls.settled(container, e.method);
                true
            }
            Outcome::Unknown => self.has_repeated(e, container, object),
        }
    }

    fn has_repeated(&mut self, e: &CallError, container: &str, object: &str) -> bool {
        self.retries.unknown_calls.add(container, e.method, object, self.ctx.clock.boot())
    }

    /// Returns the waiting reason of a container if the outcome of an image call stays unknown. A pull gets a back-off.
    fn image_failure(&mut self, e: &CallError, container: &str, image: &str) -> Option<WaitingReason> {
        if !self.is_failure(e, container, image) {
            return None;
        }
        if e.method != "PullImage" {
            return Some(StartFailure::ImageInspectError.with_message(e.message.clone()));
        }
        let (reason, boot) = (StartFailure::ErrImagePull, self.ctx.clock.boot());
        if let Ok(tagged) = image::with_tag(image) {
            self.record.pulls.record_failure(
                &tagged,
                boot,
                BackoffDelays::default(),
                reason.as_str(),
                &e.message,
            );
        }
        Some(reason.with_message(e.message.clone()))
    }

    fn not_started(
        &mut self,
        pod: &Pod,
        container: &Container,
        object: &str,
        field_path: &str,
        e: &CallError,
        reason: StartFailure,
    ) -> NotStarted {
        if !self.is_failure(e, &container.name, object) {
            return Halt::interrupted(e).into();
        }
        self.ctx.reporting.events.pod(pod, EventType::Warning, "Failed", &format!("Error: {e}"), field_path);
        waits(reason, e.message.clone())
    }

    async fn container_config(
        &self,
        pass: &Pass,
        container: &Container,
        restarts: u32,
        ready: &image::Ready,
        ips: &[IpAddr],
    ) -> Result<cri::ContainerConfig, ConfigError> {
        let (pod, node) = (&pass.pod, &self.ctx.node.settings);
        let objects = EnvObjects::fetch(pod, container, self.ctx.environment.objects.as_ref()).await;
        let volume_paths = self
            .setup
            .volumes
            .iter()
            .flatten()
            .map(|(name, v)| (name.clone(), v.host_path.clone()))
            .collect();
        let env = make_env(EnvInput {
            pod,
            container,
            node,
            pod_ips: ips,
            objects: &objects,
            volume_paths: &volume_paths,
        })?;
        let mounts = self.mounts(pod, container, &env, ips).await?;
        let (of, volumes) = (container.clone(), self.setup.volumes.clone().unwrap_or_default());
        let devices = blocking(move || block_devices(&of, &volumes)).await?;
        let log_dir = paths::pod_log_dir(&node.pod_logs_dir, &self.pod_ref).join(&container.name);
        let dir = log_dir.clone();
        let make =
            move || failpoint::file!("container's log directory made", || std::fs::create_dir_all(&dir));
        blocking(make).await.map_err(|e| {
            ConfigError::invalid(format!("create container log directory {}: {e}", log_dir.display()))
        })?;
        let user = ImageUser::from_status(ready.image.uid.as_ref().map(|u| u.value), &ready.image.username);
        container_config(ContainerInput {
            pod,
            names: &self.pod_ref,
            container,
            restarts,
            image_ref: &ready.image_ref,
            image_user: &user,
            node,
            env: &env,
            mounts: &mounts,
            devices: &devices,
            runtime_handler: &self.setup.runtime_handler,
            features: self.features(&self.setup.runtime_handler),
            userns: self.setup.user_namespace.as_ref(),
            target_id: target(pod, container, &pass.runtime)?.map(ContainerId::as_str),
        })
    }

    // If no instance is left, the log files give the number of attempts.
    async fn next_attempt(&self, pass: &Pass, container: &str) -> u32 {
        let dir = paths::pod_log_dir(&self.ctx.node.settings.pod_logs_dir, &self.pod_ref).join(container);
        let read = move || -> Vec<String> {
            let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
            entries.filter_map(|e| e.file_name().into_string().ok()).collect()
        };
        let names = blocking(read).await;
        decide_sync::next_attempt(&pass.runtime, container, names.iter().map(String::as_str))
    }

    // Log collectors read /var/log/containers.
    async fn link_log(&self, container: &Container, id: &ContainerId, restarts: u32) {
        let Some(dir) = self.ctx.node.container_logs_dir.as_deref() else { return };
        let log = paths::pod_log_dir(&self.ctx.node.settings.pod_logs_dir, &self.pod_ref)
            .join(paths::container_log_path(&container.name, restarts));
        let link = dir.join(paths::legacy_log_name(&self.pod_ref, &container.name, id.as_str()));
        let path = link.clone();
        let make = move || failpoint::file!("log linked", || std::os::unix::fs::symlink(&log, &path));
        if let Err(e) = blocking(make).await
            && e.kind() != std::io::ErrorKind::AlreadyExists
        {
            tracing::debug!(pod.uid = %self.pod_ref.uid, link = %link.display(), error = %e, "failed to link container log");
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use quintlet_testkit::pods::RuntimeBuilder;

    #[test]
    fn an_ephemeral_container_sees_the_newest_instance_of_its_target_or_is_not_made() {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "p"},
            "spec": {
                "containers": [{"name": "main"}],
                "ephemeralContainers": [
                    {"name": "look", "targetContainerName": "main"},
                    {"name": "lost", "targetContainerName": "gone"},
                    {"name": "free", "targetContainerName": ""},
                ],
            },
        }))
        .unwrap();
        let runtime = RuntimeBuilder::ready().exited("main", 1).running("main").build();
        let of = |name: &str| {
            let container: Container = serde_json::from_value(json!({"name": name})).unwrap();
            target(&pod, &container, &runtime)
                .map(|id| id.map(ToString::to_string))
                .map_err(|e| e.to_string())
        };
        assert_eq!(of("look"), Ok(Some("main-1".to_owned())));
        assert_eq!(of("lost"), Err("unable to find target container gone".to_owned()));
        assert_eq!((of("free"), of("main")), (Ok(None), Ok(None)));
    }
}
