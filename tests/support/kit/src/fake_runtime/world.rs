//! State of the runtime: sandboxes, containers, images. Synchronous and without I/O.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use quintlet_cri_api::v1;
use tokio::time::Instant;
use tonic::Status;

const POD_NAME: &str = "io.kubernetes.pod.name";
const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
const POD_UID: &str = "io.kubernetes.pod.uid";
const CONTAINER_NAME: &str = "io.kubernetes.container.name";

/// Reaction of a container to its stop signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReply {
    /// Exits with this code after this time, or with 137 if the timeout is earlier.
    Exits {
        /// Time until the exit.
        after: Duration,
        /// The exit code.
        code: i32,
    },
    /// Ignores the signal, and is killed (137) at the timeout.
    Ignores,
}

/// Behaviour of a container after its start.
#[derive(Debug, Clone, Copy)]
pub struct Behaviour {
    /// Exits after this time with this code; `None`: runs until it is stopped.
    pub exit: Option<(Duration, i32)>,
    /// Reaction to the stop signal.
    pub stop: StopReply,
}

impl Default for Behaviour {
    fn default() -> Self {
        Self { exit: None, stop: StopReply::Exits { after: Duration::ZERO, code: 143 } }
    }
}

/// A container that is created without a call.
#[derive(Debug, Clone)]
pub struct ContainerSeed {
    /// Name in the pod.
    pub name: String,
    /// Number of the instance, from 0.
    pub attempt: u32,
    /// Image, which is added if it does not exist.
    pub image: String,
    /// Annotations, which a node agent reads back.
    pub annotations: HashMap<String, String>,
    /// Environment variables, as `(name, value)`.
    pub envs: Vec<(String, String)>,
    /// Whether it is started at once.
    pub running: bool,
}

impl ContainerSeed {
    /// Returns a running container with the image `busybox` and attempt 0.
    #[must_use]
    pub fn running(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            attempt: 0,
            image: "busybox".to_owned(),
            annotations: HashMap::new(),
            envs: Vec::new(),
            running: true,
        }
    }

    /// Returns a created container that is not started.
    #[must_use]
    pub fn created(name: &str) -> Self {
        Self { running: false, ..Self::running(name) }
    }

    /// Sets the attempt.
    #[must_use]
    pub fn attempt(mut self, attempt: u32) -> Self {
        self.attempt = attempt;
        self
    }
}

/// State of a sandbox.
#[derive(Debug, Clone)]
pub struct SandboxRecord {
    /// Status in the CRI.
    pub status: v1::PodSandboxStatus,
    /// Configuration of its creation.
    pub config: v1::PodSandboxConfig,
    exiting: bool,
}

impl SandboxRecord {
    /// Returns the ID of the sandbox.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.status.id
    }

    /// Returns the UID of the pod.
    #[must_use]
    pub fn pod_uid(&self) -> &str {
        self.config.metadata.as_ref().map_or("", |m| &m.uid)
    }

    /// Returns whether the pause process runs.
    #[must_use]
    pub fn ready(&self) -> bool {
        self.status.state() == v1::PodSandboxState::SandboxReady
    }
}

/// State of a container.
#[derive(Debug, Clone)]
pub struct ContainerRecord {
    /// Status in the CRI.
    pub status: v1::ContainerStatus,
    /// Configuration of its creation.
    pub config: v1::ContainerConfig,
    /// ID of its sandbox.
    pub sandbox_id: String,
    starting: bool,
    exiting: bool,
}

impl ContainerRecord {
    /// Returns the ID of the container.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.status.id
    }

    /// Returns the name in the pod.
    #[must_use]
    pub fn name(&self) -> &str {
        self.config.metadata.as_ref().map_or("", |m| &m.name)
    }

    /// Returns what a verbose ContainerStatus adds, as containerd has it: the OCI runtime specification, with
    /// the environment.
    pub(crate) fn info(&self) -> HashMap<String, String> {
        let env: Vec<String> = self
            .config
            .envs
            .iter()
            .map(|e| format!("{}={}", e.key, String::from_utf8_lossy(&e.value)))
            .collect();
        let info = serde_json::json!({"runtimeSpec": {"process": {"env": env}}});
        HashMap::from([("info".to_owned(), info.to_string())])
    }

    /// Returns the UID of the pod, from the label.
    #[must_use]
    pub fn pod_uid(&self) -> &str {
        self.config.labels.get(POD_UID).map_or("", String::as_str)
    }

    /// Returns whether the process runs.
    #[must_use]
    pub fn running(&self) -> bool {
        self.status.state() == v1::ContainerState::ContainerRunning
    }
}

/// A removed sandbox or container.
pub(crate) struct Gone {
    pub(crate) id: String,
    pub(crate) event: Option<v1::ContainerEventResponse>,
}

pub(crate) struct World {
    /// Shared with lists in progress: a list of thousands is encoded while the state changes.
    pub(crate) sandboxes: HashMap<String, Arc<SandboxRecord>>,
    pub(crate) containers: HashMap<String, Arc<ContainerRecord>>,
    /// Images by ID.
    pub(crate) images: BTreeMap<String, v1::Image>,
    /// Reserved names with their IDs.
    names: HashMap<String, String>,
    by_sandbox: HashMap<String, Vec<String>>,
    behaviours: HashMap<String, Behaviour>,
    /// Memory usage in bytes, by container name.
    pub(crate) memory: HashMap<String, u64>,
    /// Bytes of writable layers, by container name.
    pub(crate) layers: HashMap<String, u64>,
    /// Mount point of writable layers in ImageFsInfo; empty for a runtime that reports none.
    pub(crate) container_mountpoint: String,
    pub(crate) conditions: Vec<v1::RuntimeCondition>,
    /// Repositories that require credentials: prefix of the name, user, password.
    pub(crate) protected: Vec<(String, String, String)>,
    wall_base: i64,
    started: Instant,
    last_now: i64,
    made: u64,
}

impl World {
    pub(crate) fn new(wall_base: i64) -> Self {
        let ready =
            |kind: &str| v1::RuntimeCondition { r#type: kind.to_owned(), status: true, ..Default::default() };
        Self {
            sandboxes: HashMap::new(),
            containers: HashMap::new(),
            images: BTreeMap::new(),
            names: HashMap::new(),
            by_sandbox: HashMap::new(),
            behaviours: HashMap::new(),
            memory: HashMap::new(),
            layers: HashMap::new(),
            container_mountpoint: String::new(),
            conditions: vec![ready("RuntimeReady"), ready("NetworkReady")],
            protected: Vec::new(),
            wall_base,
            started: Instant::now(),
            last_now: 0,
            made: 0,
        }
    }

    /// Returns the wall time, which is unique per call.
    pub(crate) fn now(&mut self) -> i64 {
        let elapsed = i64::try_from(self.started.elapsed().as_nanos()).unwrap_or(i64::MAX);
        self.last_now = (self.wall_base + elapsed).max(self.last_now + 1);
        self.last_now
    }

    pub(crate) fn step_clock(&mut self, by_ns: i64) {
        self.wall_base += by_ns;
        self.last_now += by_ns.min(0);
    }

    pub(crate) fn set_condition(&mut self, condition: v1::RuntimeCondition) {
        self.conditions.retain(|c| c.r#type != condition.r#type);
        self.conditions.push(condition);
    }

    pub(crate) fn set_behaviour(&mut self, name: &str, behaviour: Behaviour) {
        self.behaviours.insert(name.to_owned(), behaviour);
    }

    pub(crate) fn behaviour_of(&self, id: &str) -> Behaviour {
        let name = self.containers.get(id).map_or("", |c| c.name());
        self.behaviours.get(name).or_else(|| self.behaviours.get("*")).copied().unwrap_or_default()
    }

    /// Returns an ID of 64 hex digits whose first digits differ, since users abbreviate IDs.
    pub(crate) fn next_id(&mut self) -> String {
        self.made += 1;
        let mut out = String::with_capacity(64);
        for part in 0..4u64 {
            let mut z = (self.made << 2 | part).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            out.push_str(&format!("{:016x}", z ^ (z >> 31)));
        }
        out
    }

    /// Reserves a name for an ID, as containerd does.
    pub(crate) fn reserve(&mut self, kind: &str, name: &str, id: &str) -> Result<(), Status> {
        if let Some(owner) = self.names.get(name) {
            let text =
                format!("failed to reserve {kind} name {name:?}: name {name:?} is reserved for {owner:?}");
            return Err(Status::unknown(text));
        }
        self.names.insert(name.to_owned(), id.to_owned());
        Ok(())
    }

    /// Releases the names of an ID, unless the object was created.
    pub(crate) fn release_unmade(&mut self, id: &str) {
        if !self.sandboxes.contains_key(id) && !self.containers.contains_key(id) {
            self.names.retain(|_, owner| owner != id);
        }
    }

    pub(crate) fn add_sandbox(&mut self, config: v1::PodSandboxConfig, handler: &str) -> String {
        let id = self.next_id();
        self.names.insert(sandbox_name(&config), id.clone());
        self.insert_sandbox(id.clone(), config, handler);
        id
    }

    pub(crate) fn insert_sandbox(&mut self, id: String, config: v1::PodSandboxConfig, handler: &str) {
        let namespaces = config
            .linux
            .as_ref()
            .and_then(|l| l.security_context.as_ref())
            .and_then(|s| s.namespace_options.clone())
            .unwrap_or_default();
        let host = namespaces.network() == v1::NamespaceMode::Node;
        let n = self.made;
        let ip = if host { String::new() } else { pod_ip(n) };
        let status = v1::PodSandboxStatus {
            id: id.clone(),
            metadata: config.metadata.clone(),
            state: v1::PodSandboxState::SandboxReady as i32,
            created_at: self.now(),
            network: Some(v1::PodSandboxNetworkStatus { ip, additional_ips: Vec::new() }),
            linux: Some(v1::LinuxPodSandboxStatus {
                namespaces: Some(v1::Namespace { options: Some(namespaces) }),
            }),
            labels: config.labels.clone(),
            annotations: config.annotations.clone(),
            runtime_handler: handler.to_owned(),
        };
        self.sandboxes.insert(id, Arc::new(SandboxRecord { status, config, exiting: false }));
    }

    pub(crate) fn seed_config(&mut self, sandbox: &str, seed: &ContainerSeed) -> v1::ContainerConfig {
        if self.image(&seed.image).is_none() {
            self.add_image(&seed.image, 1 << 20);
        }
        let pod = self
            .sandboxes
            .get(sandbox)
            .expect("the sandbox is there")
            .config
            .metadata
            .clone()
            .unwrap_or_default();
        v1::ContainerConfig {
            metadata: Some(v1::ContainerMetadata { name: seed.name.clone(), attempt: seed.attempt }),
            image: Some(v1::ImageSpec { image: seed.image.clone(), ..Default::default() }),
            labels: HashMap::from([
                (POD_NAME.to_owned(), pod.name),
                (POD_NAMESPACE.to_owned(), pod.namespace),
                (POD_UID.to_owned(), pod.uid),
                (CONTAINER_NAME.to_owned(), seed.name.clone()),
            ]),
            annotations: seed.annotations.clone(),
            envs: seed
                .envs
                .iter()
                .map(|(key, value)| v1::KeyValue { key: key.clone(), value: value.clone().into_bytes() })
                .collect(),
            ..Default::default()
        }
    }

    pub(crate) fn add_container(&mut self, sandbox: &str, config: v1::ContainerConfig) -> String {
        let id = self.next_id();
        let name = self.container_name(sandbox, &config);
        self.names.insert(name, id.clone());
        self.insert_container(id.clone(), sandbox, config);
        id
    }

    pub(crate) fn insert_container(&mut self, id: String, sandbox: &str, config: v1::ContainerConfig) {
        let image = config.image.clone().unwrap_or_default();
        let found = self.image(&image.image);
        let image_id = found.map(|i| i.id.clone()).unwrap_or_default();
        let image_ref =
            found.and_then(|i| i.repo_digests.first().cloned()).unwrap_or_else(|| image_id.clone());
        let shown = found.and_then(|i| i.repo_tags.first().cloned()).unwrap_or_else(|| image.image.clone());
        let log_dir = self.sandboxes.get(sandbox).map(|s| s.config.log_directory.clone()).unwrap_or_default();
        let log_path = match (log_dir.is_empty(), config.log_path.is_empty()) {
            (false, false) => format!("{}/{}", log_dir.trim_end_matches('/'), config.log_path),
            _ => config.log_path.clone(),
        };
        let linux = config.linux.clone().unwrap_or_default();
        let user = linux.security_context.unwrap_or_default();
        let status = v1::ContainerStatus {
            id: id.clone(),
            metadata: config.metadata.clone(),
            state: v1::ContainerState::ContainerCreated as i32,
            created_at: self.now(),
            image: Some(v1::ImageSpec { image: shown, ..image }),
            image_ref,
            image_id,
            labels: config.labels.clone(),
            annotations: config.annotations.clone(),
            mounts: config.mounts.clone(),
            log_path,
            resources: linux.resources.map(|r| v1::ContainerResources { linux: Some(r), windows: None }),
            user: Some(v1::ContainerUser {
                linux: Some(v1::LinuxContainerUser {
                    uid: user.run_as_user.map_or(0, |u| u.value),
                    gid: user.run_as_group.map_or(0, |u| u.value),
                    supplemental_groups: user.supplemental_groups,
                }),
            }),
            ..Default::default()
        };
        self.by_sandbox.entry(sandbox.to_owned()).or_default().push(id.clone());
        let record = ContainerRecord {
            status,
            config,
            sandbox_id: sandbox.to_owned(),
            starting: false,
            exiting: false,
        };
        self.containers.insert(id, Arc::new(record));
    }

    pub(crate) fn container_name(&self, sandbox: &str, config: &v1::ContainerConfig) -> String {
        let pod = self.sandboxes.get(sandbox).and_then(|s| s.config.metadata.clone()).unwrap_or_default();
        let meta = config.metadata.clone().unwrap_or_default();
        format!("{}_{}_{}_{}_{}", meta.name, pod.name, pod.namespace, pod.uid, meta.attempt)
    }

    /// Records the begin of a start, which excludes others.
    pub(crate) fn begin_start(&mut self, id: &str) -> Result<(), Status> {
        let container = self.unstarted(id)?;
        if container.starting {
            return Err(not_starting(id, "container is already in starting state"));
        }
        container.starting = true;
        Ok(())
    }

    // Returns a container that was never started.
    fn unstarted(&mut self, id: &str) -> Result<&mut ContainerRecord, Status> {
        let container = self.containers.get_mut(id).map(Arc::make_mut).ok_or_else(|| no_container(id))?;
        match container.status.state() {
            v1::ContainerState::ContainerCreated => Ok(container),
            state => Err(not_starting(id, &format!("container is in {} state", state.as_str_name()))),
        }
    }

    /// Records the end of a start, whatever its outcome.
    pub(crate) fn finish_start(&mut self, id: &str) {
        if let Some(container) = self.containers.get_mut(id).map(Arc::make_mut) {
            container.starting = false;
        }
    }

    /// Terminates the container of a failed start, which never ran.
    pub(crate) fn end_unstarted(&mut self, id: &str) {
        self.finish_exit(id, 128, Some("StartError"));
        if let Some(container) = self.containers.get_mut(id).map(Arc::make_mut) {
            "failed to create containerd task: context canceled".clone_into(&mut container.status.message);
        }
    }

    /// Executes a start that has begun.
    pub(crate) fn start(&mut self, id: &str) -> Result<(), Status> {
        let now = self.now();
        let sandbox = self.unstarted(id)?.sandbox_id.clone();
        if !self.sandboxes.get(&sandbox).is_some_and(|s| s.ready() && !s.exiting) {
            return Err(Status::unknown(format!("sandbox container {sandbox:?} is not running")));
        }
        let container = self.unstarted(id)?;
        container.starting = false;
        container.status.set_state(v1::ContainerState::ContainerRunning);
        container.status.started_at = now;
        Ok(())
    }

    /// Records that a process is exiting. Returns false if none runs.
    pub(crate) fn begin_exit(&mut self, id: &str) -> bool {
        if let Some(c) = self.containers.get_mut(id).map(Arc::make_mut) {
            return c.running() && !std::mem::replace(&mut c.exiting, true);
        }
        let sandbox = self.sandboxes.get_mut(id).map(Arc::make_mut);
        sandbox.is_some_and(|s| s.ready() && !std::mem::replace(&mut s.exiting, true))
    }

    pub(crate) fn finish_exit(&mut self, id: &str, code: i32, reason: Option<&str>) {
        let now = self.now();
        if let Some(c) = self.containers.get_mut(id).map(Arc::make_mut) {
            c.status.set_state(v1::ContainerState::ContainerExited);
            c.status.finished_at = now;
            c.status.exit_code = code;
            c.status.reason = reason.unwrap_or(if code == 0 { "Completed" } else { "Error" }).to_owned();
        }
        if let Some(s) = self.sandboxes.get_mut(id).map(Arc::make_mut) {
            s.status.set_state(v1::PodSandboxState::SandboxNotready);
            // The network namespace is removed with the sandbox; containerd then reports no address.
            s.status.network = Some(v1::PodSandboxNetworkStatus::default());
        }
    }

    /// Returns the IDs of the containers of a sandbox.
    pub(crate) fn containers_of(&self, sandbox: &str) -> Vec<String> {
        self.by_sandbox.get(sandbox).cloned().unwrap_or_default()
    }

    pub(crate) fn remove(&mut self, id: &str) -> Vec<Gone> {
        let mut ids = self.containers_of(id);
        ids.push(id.to_owned());
        let mut gone = Vec::new();
        for id in ids {
            let event = self.cri_event(&id, v1::ContainerEventType::ContainerDeletedEvent);
            let container = self.containers.remove(&id);
            if container.is_none() && self.sandboxes.remove(&id).is_none() {
                continue;
            }
            if let Some(siblings) = container.and_then(|c| self.by_sandbox.get_mut(&c.sandbox_id)) {
                siblings.retain(|i| *i != id);
            }
            self.by_sandbox.remove(&id);
            self.names.retain(|_, owner| *owner != id);
            gone.push(Gone { id, event });
        }
        gone
    }

    pub(crate) fn cri_event(
        &self,
        id: &str,
        kind: v1::ContainerEventType,
    ) -> Option<v1::ContainerEventResponse> {
        let sandbox = self.containers.get(id).map_or(id, |c| &c.sandbox_id);
        let sandbox = self.sandboxes.get(sandbox)?;
        let containers = self.by_sandbox.get(sandbox.id()).into_iter().flatten();
        Some(v1::ContainerEventResponse {
            container_id: id.to_owned(),
            container_event_type: kind as i32,
            created_at: self.last_now,
            pod_sandbox_status: Some(sandbox.status.clone()),
            containers_statuses: containers
                .filter_map(|c| self.containers.get(c))
                .map(|c| c.status.clone())
                .collect(),
        })
    }

    /// Returns whether the registry returns an image for these credentials.
    pub(crate) fn gives(&self, image: &str, auth: Option<&v1::AuthConfig>) -> bool {
        let full = normalize(image);
        self.protected
            .iter()
            .filter(|(begin, _, _)| full.starts_with(begin))
            .all(|(_, user, password)| auth.is_some_and(|a| a.username == *user && a.password == *password))
    }

    /// Returns an image by ID, tag, digest or short name.
    pub(crate) fn image(&self, name: &str) -> Option<&v1::Image> {
        let full = normalize(name);
        self.images.get(name).or_else(|| {
            self.images.values().find(|i| i.repo_tags.contains(&full) || i.repo_digests.contains(&full))
        })
    }

    pub(crate) fn add_image(&mut self, name: &str, size: u64) -> String {
        let digest = format!("sha256:{}", self.next_id());
        let id = format!("sha256:{}", self.next_id());
        let full = normalize(name);
        let (repository, repo_tags) = match full.split_once('@') {
            Some((repository, _)) => (repository.to_owned(), Vec::new()),
            None => (full.rsplit_once(':').map_or(full.clone(), |(r, _)| r.to_owned()), vec![full.clone()]),
        };
        let repo_digests = vec![if full.contains('@') { full } else { format!("{repository}@{digest}") }];
        let image = v1::Image { id: id.clone(), repo_tags, repo_digests, size, ..Default::default() };
        self.images.insert(id.clone(), image);
        id
    }
}

/// Returns the address of a pod. No request to it leaves the machine.
fn pod_ip(n: u64) -> String {
    format!("127.88.{}.{}", (n >> 8) & 0xff, n & 0xff)
}

// Errors have containerd's text.
fn not_starting(id: &str, why: &str) -> Status {
    Status::unknown(format!("failed to set starting state for container {id:?}: {why}"))
}

pub(crate) fn no_container(id: &str) -> Status {
    Status::not_found(format!("an error occurred when try to find container {id:?}: not found"))
}

pub(crate) fn no_sandbox(id: &str) -> Status {
    Status::not_found(format!("an error occurred when try to find sandbox {id:?}: not found"))
}

pub(crate) fn sandbox_name(config: &v1::PodSandboxConfig) -> String {
    let meta = config.metadata.clone().unwrap_or_default();
    format!("{}_{}_{}_{}", meta.name, meta.namespace, meta.uid, meta.attempt)
}

pub(crate) fn pod_config(uid: &str, name: &str, namespace: &str, attempt: u32) -> v1::PodSandboxConfig {
    v1::PodSandboxConfig {
        metadata: Some(v1::PodSandboxMetadata {
            name: name.to_owned(),
            uid: uid.to_owned(),
            namespace: namespace.to_owned(),
            attempt,
        }),
        labels: HashMap::from([
            (POD_NAME.to_owned(), name.to_owned()),
            (POD_NAMESPACE.to_owned(), namespace.to_owned()),
            (POD_UID.to_owned(), uid.to_owned()),
        ]),
        ..Default::default()
    }
}

/// Completes a name: `busybox` is `docker.io/library/busybox:latest`.
fn normalize(name: &str) -> String {
    let with_host = match name.split_once('/') {
        None => format!("docker.io/library/{name}"),
        Some((first, _)) if !first.contains(['.', ':']) && first != "localhost" => {
            format!("docker.io/{name}")
        }
        Some(_) => name.to_owned(),
    };
    let last = with_host.rsplit('/').next().unwrap_or_default();
    if last.contains([':', '@']) { with_host } else { format!("{with_host}:latest") }
}
