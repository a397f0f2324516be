//! Assigns a class to each field, and extreme values to each class.

use quintlet_testkit::fields::{self, Field, Kind};
use serde_json::{Value, json};

/// A class of fields with the same extreme values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// A boolean.
    Flag,
    /// A signed integer of 32 bits.
    Int32,
    /// A signed integer of 64 bits.
    Int64,
    /// A number or name of a port.
    Port,
    /// A quantity, such as `100m`.
    Quantity,
    /// A time of RFC 3339.
    Time,
    /// A value of an enumeration, with one of them.
    Word(&'static str),
    /// The name of an object, a key or the like, with a valid one.
    Name(&'static str),
    /// A path or an address, with a valid one.
    Path(&'static str),
    /// A reference to an image.
    Image,
    /// A command argument or another text that the product does not interpret, with a valid one.
    Text(&'static str),
    /// JSON that the product does not interpret.
    Json,
    /// A list, with the number of items that is extreme.
    List(usize),
    /// A map, with the number of entries that is extreme.
    Map(usize),
}

/// Enumerations, each with one of its values.
const WORDS: &[(&str, &str)] = &[
    ("AppArmorProfile.type", "RuntimeDefault"),
    ("AzureDiskVolumeSource.cachingMode", "None"),
    ("AzureDiskVolumeSource.kind", "Shared"),
    ("Capabilities.add", "CHOWN"),
    ("Capabilities.drop", "CHOWN"),
    ("Container.imagePullPolicy", "IfNotPresent"),
    ("Container.restartPolicy", "Always"),
    ("Container.terminationMessagePolicy", "File"),
    ("ContainerPort.protocol", "TCP"),
    ("ContainerResizePolicy.resourceName", "cpu"),
    ("ContainerResizePolicy.restartPolicy", "NotRequired"),
    ("ContainerRestartRule.action", "Restart"),
    ("ContainerRestartRuleOnExitCodes.operator", "In"),
    ("EmptyDirVolumeSource.medium", "Memory"),
    ("EphemeralContainer.imagePullPolicy", "IfNotPresent"),
    ("EphemeralContainer.restartPolicy", "Always"),
    ("EphemeralContainer.terminationMessagePolicy", "File"),
    ("GRPCAction.mode", "TLS"),
    ("HTTPGetAction.protocol", "HTTP2"),
    ("HTTPGetAction.scheme", "HTTP"),
    ("HostPathVolumeSource.type", "Directory"),
    ("ImageVolumeSource.pullPolicy", "IfNotPresent"),
    ("LabelSelectorRequirement.operator", "In"),
    ("Lifecycle.stopSignal", "SIGTERM"),
    ("ManagedFieldsEntry.fieldsType", "FieldsV1"),
    ("ManagedFieldsEntry.operation", "Apply"),
    ("NodeSelectorRequirement.operator", "In"),
    ("ObjectFieldSelector.fieldPath", "metadata.name"),
    ("PersistentVolumeClaimSpec.accessModes", "ReadWriteOnce"),
    ("PersistentVolumeClaimSpec.volumeMode", "Filesystem"),
    ("PodCertificateProjection.keyType", "ED25519"),
    ("PodOS.name", "linux"),
    ("PodSecurityContext.fsGroupChangePolicy", "Always"),
    ("PodSecurityContext.seLinuxChangePolicy", "MountOption"),
    ("PodSecurityContext.supplementalGroupsPolicy", "Merge"),
    ("PodSpec.dnsPolicy", "ClusterFirst"),
    ("PodSpec.preemptionPolicy", "Never"),
    ("PodSpec.restartPolicy", "Always"),
    ("ResourceFieldSelector.resource", "limits.cpu"),
    ("ScaleIOVolumeSource.storageMode", "ThinProvisioned"),
    ("SeccompProfile.type", "RuntimeDefault"),
    ("SecurityContext.procMount", "Default"),
    ("Toleration.effect", "NoExecute"),
    ("Toleration.operator", "Exists"),
    ("TopologySpreadConstraint.nodeAffinityPolicy", "Honor"),
    ("TopologySpreadConstraint.nodeTaintsPolicy", "Honor"),
    ("TopologySpreadConstraint.whenUnsatisfiable", "DoNotSchedule"),
    ("VolumeMount.bindMountOptions", "noexec"),
    ("VolumeMount.mountPropagation", "None"),
    ("VolumeMount.recursiveReadOnly", "Disabled"),
];

/// Paths and addresses, each with a valid value.
const PATHS: &[(&str, &str)] = &[
    ("AppArmorProfile.localhostProfile", "x"),
    ("CephFSVolumeSource.monitors", "192.0.2.1"),
    ("CephFSVolumeSource.path", "/x"),
    ("CephFSVolumeSource.secretFile", "/x"),
    ("ClusterTrustBundleProjection.path", "x"),
    ("Container.terminationMessagePath", "/dev/termination-log"),
    ("Container.workingDir", "/"),
    ("ContainerPort.hostIP", "127.0.0.1"),
    ("DownwardAPIVolumeFile.path", "x"),
    ("EphemeralContainer.terminationMessagePath", "/dev/termination-log"),
    ("EphemeralContainer.workingDir", "/"),
    ("FileKeySelector.path", "x"),
    ("GitRepoVolumeSource.directory", "x"),
    ("GitRepoVolumeSource.repository", "https://example.test/x"),
    ("GlusterfsVolumeSource.path", "x"),
    ("HTTPGetAction.host", "127.0.0.1"),
    ("HTTPGetAction.path", "/"),
    ("HostAlias.hostnames", "x"),
    ("HostAlias.ip", "127.0.0.1"),
    ("HostPathVolumeSource.path", "/tmp"),
    ("ISCSIVolumeSource.portals", "192.0.2.1"),
    ("ISCSIVolumeSource.targetPortal", "192.0.2.1"),
    ("KeyToPath.path", "x"),
    ("NFSVolumeSource.path", "/x"),
    ("NFSVolumeSource.server", "192.0.2.1"),
    ("ObjectMeta.selfLink", "/x"),
    ("PodCertificateProjection.certificateChainPath", "x"),
    ("PodCertificateProjection.credentialBundlePath", "x"),
    ("PodCertificateProjection.keyPath", "x"),
    ("PodDNSConfig.nameservers", "192.0.2.1"),
    ("PodDNSConfig.searches", "example.test"),
    ("QuobyteVolumeSource.registry", "192.0.2.1:1"),
    ("RBDVolumeSource.keyring", "/x"),
    ("RBDVolumeSource.monitors", "192.0.2.1"),
    ("ScaleIOVolumeSource.gateway", "https://example.test/x"),
    ("SeccompProfile.localhostProfile", "x"),
    ("ServiceAccountTokenProjection.path", "x"),
    ("TCPSocketAction.host", "127.0.0.1"),
    ("VolumeDevice.devicePath", "/dev/x"),
    ("VolumeMount.mountPath", "/v"),
    ("VolumeMount.subPath", "x"),
    ("VolumeMount.subPathExpr", "x"),
    ("VsphereVirtualDiskVolumeSource.volumePath", "x"),
];

/// Names, each with a valid value other than `x`.
const NAMES: &[(&str, &str)] = &[
    ("AWSElasticBlockStoreVolumeSource.fsType", "ext4"),
    ("AWSElasticBlockStoreVolumeSource.volumeID", "x"),
    ("AzureDiskVolumeSource.diskName", "x"),
    ("AzureDiskVolumeSource.diskURI", "x"),
    ("AzureDiskVolumeSource.fsType", "ext4"),
    ("AzureFileVolumeSource.secretName", "x"),
    ("AzureFileVolumeSource.shareName", "x"),
    ("CSIVolumeSource.driver", "x"),
    ("CSIVolumeSource.fsType", "ext4"),
    ("CephFSVolumeSource.user", "x"),
    ("CinderVolumeSource.fsType", "ext4"),
    ("CinderVolumeSource.volumeID", "x"),
    ("ClusterTrustBundleProjection.name", "x"),
    ("ClusterTrustBundleProjection.signerName", "example.test/x"),
    ("ConfigMapEnvSource.name", "x"),
    ("ConfigMapKeySelector.key", "x"),
    ("ConfigMapKeySelector.name", "x"),
    ("ConfigMapProjection.name", "x"),
    ("ConfigMapVolumeSource.name", "x"),
    ("Container.name", "x"),
    ("ContainerPort.name", "x"),
    ("EnvVar.name", "X"),
    ("EphemeralContainer.name", "x"),
    ("EphemeralContainer.targetContainerName", "x"),
    ("EvictionResponder.name", "example.test/x"),
    ("FCVolumeSource.fsType", "ext4"),
    ("FCVolumeSource.targetWWNs", "x"),
    ("FCVolumeSource.wwids", "x"),
    ("FileKeySelector.key", "X"),
    ("FileKeySelector.volumeName", "x"),
    ("FlexVolumeSource.driver", "x/x"),
    ("FlexVolumeSource.fsType", "ext4"),
    ("FlockerVolumeSource.datasetName", "x"),
    ("FlockerVolumeSource.datasetUUID", "x"),
    ("GCEPersistentDiskVolumeSource.fsType", "ext4"),
    ("GCEPersistentDiskVolumeSource.pdName", "x"),
    ("GRPCAction.service", "x"),
    ("GlusterfsVolumeSource.endpoints", "x"),
    ("HTTPHeader.name", "X-Probe"),
    ("ISCSIVolumeSource.fsType", "ext4"),
    ("ISCSIVolumeSource.initiatorName", "x"),
    ("ISCSIVolumeSource.iqn", "iqn.2001-04.com.example:x"),
    ("ISCSIVolumeSource.iscsiInterface", "default"),
    ("KeyToPath.key", "x"),
    ("LabelSelectorRequirement.key", "x"),
    ("LabelSelectorRequirement.values", "x"),
    ("LocalObjectReference.name", "x"),
    ("ManagedFieldsEntry.apiVersion", "v1"),
    ("ManagedFieldsEntry.manager", "x"),
    ("ManagedFieldsEntry.subresource", "status"),
    ("NodeSelectorRequirement.key", "x"),
    ("NodeSelectorRequirement.values", "x"),
    ("ObjectFieldSelector.apiVersion", "v1"),
    ("ObjectMeta.finalizers", "example.test/x"),
    ("ObjectMeta.generateName", "x-"),
    ("ObjectMeta.name", "x"),
    ("ObjectMeta.namespace", "default"),
    ("ObjectMeta.resourceVersion", "1"),
    ("ObjectMeta.uid", "x"),
    ("OwnerReference.apiVersion", "v1"),
    ("OwnerReference.kind", "ConfigMap"),
    ("OwnerReference.name", "x"),
    ("OwnerReference.uid", "x"),
    ("PersistentVolumeClaimSpec.storageClassName", "x"),
    ("PersistentVolumeClaimSpec.volumeAttributesClassName", "x"),
    ("PersistentVolumeClaimSpec.volumeName", "x"),
    ("PersistentVolumeClaimVolumeSource.claimName", "x"),
    ("PhotonPersistentDiskVolumeSource.fsType", "ext4"),
    ("PhotonPersistentDiskVolumeSource.pdID", "x"),
    ("PodAffinityTerm.matchLabelKeys", "x"),
    ("PodAffinityTerm.mismatchLabelKeys", "x"),
    ("PodAffinityTerm.namespaces", "x"),
    ("PodAffinityTerm.topologyKey", "x"),
    ("PodCertificateProjection.signerName", "example.test/x"),
    ("PodDNSConfigOption.name", "x"),
    ("PodReadinessGate.conditionType", "example.test/x"),
    ("PodResourceClaim.name", "x"),
    ("PodResourceClaim.resourceClaimName", "x"),
    ("PodResourceClaim.resourceClaimTemplateName", "x"),
    ("PodSchedulingGate.name", "example.test/x"),
    ("PodSchedulingGroup.podGroupName", "x"),
    ("PodSpec.hostname", "x"),
    ("PodSpec.hostnameOverride", "x"),
    ("PodSpec.nodeName", "x"),
    ("PodSpec.priorityClassName", "x"),
    ("PodSpec.runtimeClassName", "x"),
    ("PodSpec.schedulerName", "x"),
    ("PodSpec.serviceAccount", "x"),
    ("PodSpec.serviceAccountName", "x"),
    ("PodSpec.subdomain", "x"),
    ("PortworxVolumeSource.fsType", "ext4"),
    ("PortworxVolumeSource.volumeID", "x"),
    ("QuobyteVolumeSource.group", "x"),
    ("QuobyteVolumeSource.tenant", "x"),
    ("QuobyteVolumeSource.user", "x"),
    ("QuobyteVolumeSource.volume", "x"),
    ("RBDVolumeSource.fsType", "ext4"),
    ("RBDVolumeSource.image", "x"),
    ("RBDVolumeSource.pool", "x"),
    ("RBDVolumeSource.user", "x"),
    ("ResourceClaim.name", "x"),
    ("ResourceClaim.request", "x"),
    ("ResourceFieldSelector.containerName", "main"),
    ("SELinuxOptions.level", "s0"),
    ("SELinuxOptions.role", "x"),
    ("SELinuxOptions.type", "x"),
    ("SELinuxOptions.user", "x"),
    ("ScaleIOVolumeSource.fsType", "ext4"),
    ("ScaleIOVolumeSource.protectionDomain", "x"),
    ("ScaleIOVolumeSource.storagePool", "x"),
    ("ScaleIOVolumeSource.system", "x"),
    ("ScaleIOVolumeSource.volumeName", "x"),
    ("SecretEnvSource.name", "x"),
    ("SecretKeySelector.key", "x"),
    ("SecretKeySelector.name", "x"),
    ("SecretProjection.name", "x"),
    ("SecretVolumeSource.secretName", "x"),
    ("StorageOSVolumeSource.fsType", "ext4"),
    ("StorageOSVolumeSource.volumeName", "x"),
    ("StorageOSVolumeSource.volumeNamespace", "x"),
    ("Sysctl.name", "kernel.shm_rmid_forced"),
    ("Toleration.key", "x"),
    ("TopologySpreadConstraint.matchLabelKeys", "x"),
    ("TopologySpreadConstraint.topologyKey", "x"),
    ("TypedLocalObjectReference.apiGroup", "example.test"),
    ("TypedLocalObjectReference.kind", "X"),
    ("TypedLocalObjectReference.name", "x"),
    ("TypedObjectReference.apiGroup", "example.test"),
    ("TypedObjectReference.kind", "X"),
    ("TypedObjectReference.name", "x"),
    ("TypedObjectReference.namespace", "x"),
    ("Volume.name", "x"),
    ("VolumeDevice.name", "v"),
    ("VolumeMount.name", "v"),
    ("VsphereVirtualDiskVolumeSource.fsType", "ext4"),
    ("VsphereVirtualDiskVolumeSource.storagePolicyID", "x"),
    ("VsphereVirtualDiskVolumeSource.storagePolicyName", "x"),
    ("WindowsSecurityContextOptions.gmsaCredentialSpecName", "x"),
    ("WindowsSecurityContextOptions.runAsUserName", "x"),
];

/// Arbitrary texts, each with a valid value.
const TEXTS: &[(&str, &str)] = &[
    ("CSIVolumeSource.volumeAttributes", "x"),
    ("Container.args", "x"),
    ("Container.command", "x"),
    ("EnvFromSource.prefix", "X_"),
    ("EnvVar.value", "x"),
    ("EphemeralContainer.args", "x"),
    ("EphemeralContainer.command", "x"),
    ("ExecAction.command", "true"),
    ("FlexVolumeSource.options", "x"),
    ("GitRepoVolumeSource.revision", "x"),
    ("HTTPHeader.value", "x"),
    ("LabelSelector.matchLabels", "x"),
    ("ObjectMeta.annotations", "x"),
    ("ObjectMeta.labels", "x"),
    ("PodCertificateProjection.userAnnotations", "x"),
    ("PodDNSConfigOption.value", "1"),
    ("PodSpec.nodeSelector", "x"),
    ("ServiceAccountTokenProjection.audience", "x"),
    ("Sysctl.value", "1"),
    ("Toleration.value", "x"),
    ("WindowsSecurityContextOptions.gmsaCredentialSpec", "x"),
];

const IMAGES: &[&str] = &["Container.image", "EphemeralContainer.image", "ImageVolumeSource.reference"];

/// Lists with expensive items: each container has its own directories, log and cgroup.
const CONTAINERS: &[&str] = &["PodSpec.containers", "PodSpec.initContainers", "PodSpec.ephemeralContainers"];

fn find(table: &[(&str, &'static str)], owner: &str) -> Option<&'static str> {
    table.iter().find(|(listed, _)| *listed == owner).map(|(_, good)| *good)
}

/// Returns the fields of a pod that hold a value. A struct is represented by its fields.
#[must_use]
pub fn fields_of_pod() -> Vec<Field> {
    fields::of_pod().into_iter().filter(|field| !matches!(field.kind, Kind::Struct(_))).collect()
}

/// Returns the class of a field; `None` if it has none yet.
#[must_use]
pub fn of(field: &Field) -> Option<Class> {
    let owner = field.owner.as_str();
    Some(match field.kind {
        Kind::Bool => Class::Flag,
        Kind::I32 => Class::Int32,
        Kind::I64 => Class::Int64,
        Kind::Quantity => Class::Quantity,
        Kind::IntOrString => Class::Port,
        Kind::Time => Class::Time,
        Kind::Json => Class::Json,
        Kind::Struct(_) => return None,
        Kind::Map => Class::Map(10_000),
        Kind::List if CONTAINERS.contains(&owner) => Class::List(1_000),
        Kind::List => Class::List(10_000),
        Kind::String if IMAGES.contains(&owner) => Class::Image,
        Kind::String => find(WORDS, owner)
            .map(Class::Word)
            .or_else(|| find(PATHS, owner).map(Class::Path))
            .or_else(|| find(NAMES, owner).map(Class::Name))
            .or_else(|| find(TEXTS, owner).map(Class::Text))?,
    })
}

/// Returns the entries of the tables that match no field.
#[must_use]
pub fn unused(fields: &[Field]) -> Vec<&'static str> {
    let tables = [WORDS, PATHS, NAMES, TEXTS].into_iter().flatten().map(|(owner, _)| *owner);
    let all = tables.chain(IMAGES.iter().copied()).chain(CONTAINERS.iter().copied());
    all.filter(|owner| !fields.iter().any(|f| f.owner == *owner)).collect()
}

/// Length of the longest texts, in bytes.
pub const MIB: usize = 1 << 20;
/// Levels of the deepest paths.
pub const LEVELS: usize = 20_000;

/// Name of an extreme value, and the function that builds it.
pub type Extreme = (&'static str, fn() -> Value);

fn extreme(name: &'static str, value: fn() -> Value) -> Extreme {
    (name, value)
}

impl Class {
    /// Returns a valid value.
    #[must_use]
    pub fn good(self) -> Value {
        match self {
            Self::Flag => json!(false),
            Self::Int32 | Self::Int64 => json!(1),
            Self::Port => json!(8080),
            Self::Quantity => json!("1"),
            Self::Time => json!("2026-01-01T00:00:00Z"),
            Self::Word(good) | Self::Name(good) | Self::Path(good) | Self::Text(good) => json!(good),
            Self::Image => json!("example.test/app:1"),
            Self::Json => json!({}),
            Self::List(_) => json!([]),
            Self::Map(_) => json!({}),
        }
    }

    /// Returns the named extreme values, the worst first, each with the function that builds it: some have a
    /// mebibyte. Lists and maps have none here, since their items depend on the field.
    #[must_use]
    pub fn extremes(self) -> Vec<Extreme> {
        match self {
            Self::Flag => vec![extreme("true", || json!(true)), extreme("false", || json!(false))],
            Self::Int32 => {
                vec![
                    extreme("max", || json!(i32::MAX)),
                    extreme("min", || json!(i32::MIN)),
                    extreme("-1", || json!(-1)),
                    extreme("0", || json!(0)),
                ]
            }
            Self::Int64 => {
                vec![
                    extreme("max", || json!(i64::MAX)),
                    extreme("min", || json!(i64::MIN)),
                    extreme("-1", || json!(-1)),
                    extreme("0", || json!(0)),
                ]
            }
            Self::Port => vec![
                extreme("max", || json!(i32::MAX)),
                extreme("min", || json!(i32::MIN)),
                extreme("65536", || json!(65_536)),
                extreme("0", || json!(0)),
                extreme("unknown-name", || json!("nowhere")),
                extreme("1-mib", || json!("x".repeat(MIB))),
            ],
            Self::Quantity => vec![
                extreme("max", || json!("9223372036854775807")),
                extreme("beyond-max", || json!("99999999999999999999999999999999999999999Ei")),
                extreme("min", || json!("-9223372036854775808")),
                extreme("tiny", || json!("0.000000000000000000000000000000001")),
                extreme("exponent", || json!("1e2147483647")),
                extreme("no-quantity", || json!("many")),
                extreme("empty", || json!("")),
                extreme("1-mib", || json!("9".repeat(MIB))),
            ],
            Self::Time => vec![
                extreme("last", || json!("9999-12-31T23:59:59Z")),
                extreme("first", || json!("0001-01-01T00:00:00Z")),
                extreme("no-time", || json!("now")),
            ],
            Self::Word(_) => {
                vec![
                    extreme("unknown-word", || json!("Sideways")),
                    extreme("empty", || json!("")),
                    extreme("1-mib", || json!("x".repeat(MIB))),
                ]
            }
            Self::Name(_) => vec![
                extreme("253-letters", || json!("x".repeat(253))),
                extreme("1-mib", || json!("x".repeat(MIB))),
                extreme("empty", || json!("")),
                extreme("upwards", || json!("../../../etc")),
                extreme("control", || json!("a\u{0}\n\u{1b}[2J\u{202e}z")),
            ],
            Self::Path(_) => vec![
                extreme("20000-levels", || json!("a/".repeat(LEVELS))),
                extreme("upwards", || json!("../".repeat(200) + "etc/passwd")),
                extreme("1-mib", || json!("x".repeat(MIB))),
                extreme("empty", || json!("")),
                extreme("control", || json!("/a\u{0}\n\u{1b}[2J\u{202e}z")),
            ],
            Self::Image => vec![
                extreme("250-letters-of-host", || json!(format!("{}:5000/app:1", "a".repeat(250)))),
                extreme("1-mib", || json!("x".repeat(MIB))),
                extreme("20000-levels", || json!("a/".repeat(LEVELS) + "a:1")),
                extreme("empty", || json!("")),
                extreme("control", || json!("a\u{0}\n\u{1b}[2J\u{202e}z")),
            ],
            Self::Text(_) => vec![
                extreme("1-mib", || json!("x".repeat(MIB))),
                extreme("control", || json!("a\u{0}\n\u{1b}[2J\u{202e}z")),
                extreme("references", || json!("$(A)".repeat(1000))),
                extreme("empty", || json!("")),
            ],
            Self::Json => {
                vec![extreme("100-levels", || (0..100).fold(json!({}), |deep, _| json!({ "f:x": deep })))]
            }
            Self::List(_) | Self::Map(_) => Vec::new(),
        }
    }
}
