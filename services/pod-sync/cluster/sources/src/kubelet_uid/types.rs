//! The internal types that a pod consists of, as data.
//!
//! Facts about Go types: the name of each struct as `reflect` prints it, and its fields in order, each with
//! its JSON key and its Go type. A key that is empty is that of an embedded struct, whose fields are keys of
//! the same object. 1.35 and 1.36 have the order of `pkg/apis/core: Pod` of these releases. From 1.37 the
//! internal types have the memory layout of the types in `k8s.io/api/core/v1`.

use super::layout::KubeletVersion::{self, V1_35, V1_36, V1_37};
use super::layout::{Structure, field, structure};

/// Returns the struct with this name, or `None` if the type is not a struct of the table.
pub(super) fn find(name: &str, version: KubeletVersion) -> Option<&'static Structure> {
    let first = STRUCTURES.partition_point(|found| found.name < name);
    STRUCTURES[first..].iter().take_while(|found| found.name == name).find(|found| found.is_in(version))
}

/// The structs, sorted by name. One whose layout has changed has an entry per layout.
static STRUCTURES: &[Structure] = &[
    structure(
        "core.AWSElasticBlockStoreVolumeSource",
        &[
            field("VolumeID", "volumeID", "string"),
            field("FSType", "fsType", "string"),
            field("Partition", "partition", "int32"),
            field("ReadOnly", "readOnly", "bool"),
        ],
    ),
    structure(
        "core.Affinity",
        &[
            field("NodeAffinity", "nodeAffinity", "*core.NodeAffinity"),
            field("PodAffinity", "podAffinity", "*core.PodAffinity"),
            field("PodAntiAffinity", "podAntiAffinity", "*core.PodAntiAffinity"),
        ],
    ),
    structure(
        "core.AppArmorProfile",
        &[
            field("Type", "type", "core.AppArmorProfileType"),
            field("LocalhostProfile", "localhostProfile", "*string"),
        ],
    ),
    structure(
        "core.AzureDiskVolumeSource",
        &[
            field("DiskName", "diskName", "string"),
            field("DataDiskURI", "diskURI", "string"),
            field("CachingMode", "cachingMode", "*core.AzureDataDiskCachingMode"),
            field("FSType", "fsType", "*string"),
            field("ReadOnly", "readOnly", "*bool"),
            field("Kind", "kind", "*core.AzureDataDiskKind"),
        ],
    ),
    structure(
        "core.AzureFileVolumeSource",
        &[
            field("SecretName", "secretName", "string"),
            field("ShareName", "shareName", "string"),
            field("ReadOnly", "readOnly", "bool"),
        ],
    ),
    structure(
        "core.CSIVolumeSource",
        &[
            field("Driver", "driver", "string"),
            field("ReadOnly", "readOnly", "*bool"),
            field("FSType", "fsType", "*string"),
            field("VolumeAttributes", "volumeAttributes", "map[string]string"),
            field("NodePublishSecretRef", "nodePublishSecretRef", "*core.LocalObjectReference"),
        ],
    ),
    structure(
        "core.Capabilities",
        &[field("Add", "add", "[]core.Capability"), field("Drop", "drop", "[]core.Capability")],
    ),
    structure(
        "core.CephFSVolumeSource",
        &[
            field("Monitors", "monitors", "[]string"),
            field("Path", "path", "string"),
            field("User", "user", "string"),
            field("SecretFile", "secretFile", "string"),
            field("SecretRef", "secretRef", "*core.LocalObjectReference"),
            field("ReadOnly", "readOnly", "bool"),
        ],
    ),
    structure(
        "core.CinderVolumeSource",
        &[
            field("VolumeID", "volumeID", "string"),
            field("FSType", "fsType", "string"),
            field("ReadOnly", "readOnly", "bool"),
            field("SecretRef", "secretRef", "*core.LocalObjectReference"),
        ],
    ),
    structure(
        "core.ClusterTrustBundleProjection",
        &[
            field("Name", "name", "*string"),
            field("SignerName", "signerName", "*string"),
            field("LabelSelector", "labelSelector", "*v1.LabelSelector"),
            field("Optional", "optional", "*bool"),
            field("Path", "path", "string"),
            field("User", "user", "*int64").since(V1_37),
        ],
    ),
    structure(
        "core.ConfigMapEnvSource",
        &[
            field("LocalObjectReference", "", "core.LocalObjectReference"),
            field("Optional", "optional", "*bool"),
        ],
    ),
    structure(
        "core.ConfigMapKeySelector",
        &[
            field("LocalObjectReference", "", "core.LocalObjectReference"),
            field("Key", "key", "string"),
            field("Optional", "optional", "*bool"),
        ],
    ),
    structure(
        "core.ConfigMapProjection",
        &[
            field("LocalObjectReference", "", "core.LocalObjectReference"),
            field("Items", "items", "[]core.KeyToPath"),
            field("Optional", "optional", "*bool"),
        ],
    ),
    structure(
        "core.ConfigMapVolumeSource",
        &[
            field("LocalObjectReference", "", "core.LocalObjectReference"),
            field("Items", "items", "[]core.KeyToPath"),
            field("DefaultMode", "defaultMode", "*int32"),
            field("Optional", "optional", "*bool"),
            field("DefaultUser", "defaultUser", "*int64").since(V1_37),
        ],
    ),
    structure(
        "core.Container",
        &[
            field("Name", "name", "string"),
            field("Image", "image", "string"),
            field("Command", "command", "[]string"),
            field("Args", "args", "[]string"),
            field("WorkingDir", "workingDir", "string"),
            field("Ports", "ports", "[]core.ContainerPort"),
            field("EnvFrom", "envFrom", "[]core.EnvFromSource"),
            field("Env", "env", "[]core.EnvVar"),
            field("Resources", "resources", "core.ResourceRequirements"),
            field("ResizePolicy", "resizePolicy", "[]core.ContainerResizePolicy"),
            field("RestartPolicy", "restartPolicy", "*core.ContainerRestartPolicy"),
            field("RestartPolicyRules", "restartPolicyRules", "[]core.ContainerRestartRule"),
            field("VolumeMounts", "volumeMounts", "[]core.VolumeMount"),
            field("VolumeDevices", "volumeDevices", "[]core.VolumeDevice"),
            field("LivenessProbe", "livenessProbe", "*core.Probe"),
            field("ReadinessProbe", "readinessProbe", "*core.Probe"),
            field("StartupProbe", "startupProbe", "*core.Probe"),
            field("Lifecycle", "lifecycle", "*core.Lifecycle"),
            field("TerminationMessagePath", "terminationMessagePath", "string"),
            field("TerminationMessagePolicy", "terminationMessagePolicy", "core.TerminationMessagePolicy"),
            field("ImagePullPolicy", "imagePullPolicy", "core.PullPolicy"),
            field("SecurityContext", "securityContext", "*core.SecurityContext"),
            field("Stdin", "stdin", "bool"),
            field("StdinOnce", "stdinOnce", "bool"),
            field("TTY", "tty", "bool"),
        ],
    ),
    structure(
        "core.ContainerExtendedResourceRequest",
        &[
            field("ContainerName", "containerName", "string"),
            field("ResourceName", "resourceName", "string"),
            field("RequestName", "requestName", "string"),
        ],
    ),
    structure(
        "core.ContainerPort",
        &[
            field("Name", "name", "string"),
            field("HostPort", "hostPort", "int32"),
            field("ContainerPort", "containerPort", "int32"),
            field("Protocol", "protocol", "core.Protocol"),
            field("HostIP", "hostIP", "string"),
        ],
    ),
    structure(
        "core.ContainerResizePolicy",
        &[
            field("ResourceName", "resourceName", "core.ResourceName"),
            field("RestartPolicy", "restartPolicy", "core.ResourceResizeRestartPolicy"),
        ],
    ),
    structure(
        "core.ContainerRestartRule",
        &[
            field("Action", "action", "core.ContainerRestartRuleAction"),
            field("ExitCodes", "exitCodes", "*core.ContainerRestartRuleOnExitCodes"),
        ],
    ),
    structure(
        "core.ContainerRestartRuleOnExitCodes",
        &[
            field("Operator", "operator", "core.ContainerRestartRuleOnExitCodesOperator"),
            field("Values", "values", "[]int32"),
        ],
    ),
    structure(
        "core.ContainerState",
        &[
            field("Waiting", "waiting", "*core.ContainerStateWaiting"),
            field("Running", "running", "*core.ContainerStateRunning"),
            field("Terminated", "terminated", "*core.ContainerStateTerminated"),
        ],
    ),
    structure("core.ContainerStateRunning", &[field("StartedAt", "startedAt", "v1.Time")]),
    structure(
        "core.ContainerStateTerminated",
        &[
            field("ExitCode", "exitCode", "int32"),
            field("Signal", "signal", "int32"),
            field("Reason", "reason", "string"),
            field("Message", "message", "string"),
            field("StartedAt", "startedAt", "v1.Time"),
            field("FinishedAt", "finishedAt", "v1.Time"),
            field("ContainerID", "containerID", "string"),
        ],
    ),
    structure(
        "core.ContainerStateWaiting",
        &[field("Reason", "reason", "string"), field("Message", "message", "string")],
    ),
    structure(
        "core.ContainerStatus",
        &[
            field("Name", "name", "string"),
            field("State", "state", "core.ContainerState"),
            field("LastTerminationState", "lastState", "core.ContainerState"),
            field("Ready", "ready", "bool"),
            field("RestartCount", "restartCount", "int32"),
            field("Image", "image", "string"),
            field("ImageID", "imageID", "string"),
            field("ContainerID", "containerID", "string"),
            field("Started", "started", "*bool"),
            field("AllocatedResources", "allocatedResources", "core.ResourceList"),
            field("Resources", "resources", "*core.ResourceRequirements"),
            field("VolumeMounts", "volumeMounts", "[]core.VolumeMountStatus"),
            field("User", "user", "*core.ContainerUser"),
            field("AllocatedResourcesStatus", "allocatedResourcesStatus", "[]core.ResourceStatus"),
            field("StopSignal", "stopSignal", "*core.Signal"),
        ],
    ),
    structure("core.ContainerUser", &[field("Linux", "linux", "*core.LinuxContainerUser")]),
    structure("core.DownwardAPIProjection", &[field("Items", "items", "[]core.DownwardAPIVolumeFile")]),
    structure(
        "core.DownwardAPIVolumeFile",
        &[
            field("Path", "path", "string"),
            field("FieldRef", "fieldRef", "*core.ObjectFieldSelector"),
            field("ResourceFieldRef", "resourceFieldRef", "*core.ResourceFieldSelector"),
            field("Mode", "mode", "*int32"),
            field("User", "user", "*int64").since(V1_37),
        ],
    ),
    structure(
        "core.DownwardAPIVolumeSource",
        &[
            field("Items", "items", "[]core.DownwardAPIVolumeFile"),
            field("DefaultMode", "defaultMode", "*int32"),
            field("DefaultUser", "defaultUser", "*int64").since(V1_37),
        ],
    ),
    structure(
        "core.EmptyDirVolumeSource",
        &[
            field("Medium", "medium", "core.StorageMedium"),
            field("SizeLimit", "sizeLimit", "*resource.Quantity"),
            field("Mode", "mode", "*int32").since(V1_37),
        ],
    ),
    structure(
        "core.EnvFromSource",
        &[
            field("Prefix", "prefix", "string"),
            field("ConfigMapRef", "configMapRef", "*core.ConfigMapEnvSource"),
            field("SecretRef", "secretRef", "*core.SecretEnvSource"),
        ],
    ),
    structure(
        "core.EnvVar",
        &[
            field("Name", "name", "string"),
            field("Value", "value", "string"),
            field("ValueFrom", "valueFrom", "*core.EnvVarSource"),
        ],
    ),
    structure(
        "core.EnvVarSource",
        &[
            field("FieldRef", "fieldRef", "*core.ObjectFieldSelector"),
            field("ResourceFieldRef", "resourceFieldRef", "*core.ResourceFieldSelector"),
            field("ConfigMapKeyRef", "configMapKeyRef", "*core.ConfigMapKeySelector"),
            field("SecretKeyRef", "secretKeyRef", "*core.SecretKeySelector"),
            field("FileKeyRef", "fileKeyRef", "*core.FileKeySelector"),
        ],
    ),
    structure(
        "core.EphemeralContainer",
        &[
            field("EphemeralContainerCommon", "", "core.EphemeralContainerCommon"),
            field("TargetContainerName", "targetContainerName", "string"),
        ],
    ),
    structure(
        "core.EphemeralContainerCommon",
        &[
            field("Name", "name", "string"),
            field("Image", "image", "string"),
            field("Command", "command", "[]string"),
            field("Args", "args", "[]string"),
            field("WorkingDir", "workingDir", "string"),
            field("Ports", "ports", "[]core.ContainerPort"),
            field("EnvFrom", "envFrom", "[]core.EnvFromSource"),
            field("Env", "env", "[]core.EnvVar"),
            field("Resources", "resources", "core.ResourceRequirements"),
            field("ResizePolicy", "resizePolicy", "[]core.ContainerResizePolicy"),
            field("RestartPolicy", "restartPolicy", "*core.ContainerRestartPolicy"),
            field("RestartPolicyRules", "restartPolicyRules", "[]core.ContainerRestartRule"),
            field("VolumeMounts", "volumeMounts", "[]core.VolumeMount"),
            field("VolumeDevices", "volumeDevices", "[]core.VolumeDevice"),
            field("LivenessProbe", "livenessProbe", "*core.Probe"),
            field("ReadinessProbe", "readinessProbe", "*core.Probe"),
            field("StartupProbe", "startupProbe", "*core.Probe"),
            field("Lifecycle", "lifecycle", "*core.Lifecycle"),
            field("TerminationMessagePath", "terminationMessagePath", "string"),
            field("TerminationMessagePolicy", "terminationMessagePolicy", "core.TerminationMessagePolicy"),
            field("ImagePullPolicy", "imagePullPolicy", "core.PullPolicy"),
            field("SecurityContext", "securityContext", "*core.SecurityContext"),
            field("Stdin", "stdin", "bool"),
            field("StdinOnce", "stdinOnce", "bool"),
            field("TTY", "tty", "bool"),
        ],
    ),
    structure(
        "core.EphemeralVolumeSource",
        &[field("VolumeClaimTemplate", "volumeClaimTemplate", "*core.PersistentVolumeClaimTemplate")],
    ),
    structure(
        "core.EvictionResponder",
        &[field("Name", "name", "string"), field("Priority", "priority", "*int32")],
    ),
    structure("core.ExecAction", &[field("Command", "command", "[]string")]),
    structure(
        "core.FCVolumeSource",
        &[
            field("TargetWWNs", "targetWWNs", "[]string"),
            field("Lun", "lun", "*int32"),
            field("FSType", "fsType", "string"),
            field("ReadOnly", "readOnly", "bool"),
            field("WWIDs", "wwids", "[]string"),
        ],
    ),
    structure(
        "core.FileKeySelector",
        &[
            field("VolumeName", "volumeName", "string"),
            field("Path", "path", "string"),
            field("Key", "key", "string"),
            field("Optional", "optional", "*bool"),
        ],
    ),
    structure(
        "core.FlexVolumeSource",
        &[
            field("Driver", "driver", "string"),
            field("FSType", "fsType", "string"),
            field("SecretRef", "secretRef", "*core.LocalObjectReference"),
            field("ReadOnly", "readOnly", "bool"),
            field("Options", "options", "map[string]string"),
        ],
    ),
    structure(
        "core.FlockerVolumeSource",
        &[field("DatasetName", "datasetName", "string"), field("DatasetUUID", "datasetUUID", "string")],
    ),
    structure(
        "core.GCEPersistentDiskVolumeSource",
        &[
            field("PDName", "pdName", "string"),
            field("FSType", "fsType", "string"),
            field("Partition", "partition", "int32"),
            field("ReadOnly", "readOnly", "bool"),
        ],
    ),
    structure(
        "core.GRPCAction",
        &[
            field("Port", "port", "int32"),
            field("Service", "service", "*string"),
            field("Mode", "mode", "*core.GRPCProbeMode").since(V1_37),
        ],
    ),
    structure(
        "core.GitRepoVolumeSource",
        &[
            field("Repository", "repository", "string"),
            field("Revision", "revision", "string"),
            field("Directory", "directory", "string"),
        ],
    ),
    structure(
        "core.GlusterfsVolumeSource",
        &[
            field("EndpointsName", "endpoints", "string"),
            field("Path", "path", "string"),
            field("ReadOnly", "readOnly", "bool"),
        ],
    ),
    structure(
        "core.HTTPGetAction",
        &[
            field("Path", "path", "string"),
            field("Port", "port", "intstr.IntOrString"),
            field("Host", "host", "string"),
            field("Scheme", "scheme", "core.URIScheme"),
            field("HTTPHeaders", "httpHeaders", "[]core.HTTPHeader"),
            field("Protocol", "protocol", "*core.HTTPProtocol").since(V1_37),
        ],
    ),
    structure("core.HTTPHeader", &[field("Name", "name", "string"), field("Value", "value", "string")]),
    structure("core.HostAlias", &[field("IP", "ip", "string"), field("Hostnames", "hostnames", "[]string")]),
    structure("core.HostIP", &[field("IP", "ip", "string")]),
    structure(
        "core.HostPathVolumeSource",
        &[field("Path", "path", "string"), field("Type", "type", "*core.HostPathType")],
    ),
    structure(
        "core.ISCSIVolumeSource",
        &[
            field("TargetPortal", "targetPortal", "string"),
            field("IQN", "iqn", "string"),
            field("Lun", "lun", "int32"),
            field("ISCSIInterface", "iscsiInterface", "string"),
            field("FSType", "fsType", "string"),
            field("ReadOnly", "readOnly", "bool"),
            field("Portals", "portals", "[]string"),
            field("DiscoveryCHAPAuth", "chapAuthDiscovery", "bool"),
            field("SessionCHAPAuth", "chapAuthSession", "bool"),
            field("SecretRef", "secretRef", "*core.LocalObjectReference"),
            field("InitiatorName", "initiatorName", "*string"),
        ],
    ),
    structure(
        "core.ImageVolumeSource",
        &[field("Reference", "reference", "string"), field("PullPolicy", "pullPolicy", "core.PullPolicy")],
    ),
    structure("core.ImageVolumeStatus", &[field("ImageRef", "imageRef", "string")]),
    structure(
        "core.KeyToPath",
        &[
            field("Key", "key", "string"),
            field("Path", "path", "string"),
            field("Mode", "mode", "*int32"),
            field("User", "user", "*int64").since(V1_37),
        ],
    ),
    structure(
        "core.Lifecycle",
        &[
            field("PostStart", "postStart", "*core.LifecycleHandler"),
            field("PreStop", "preStop", "*core.LifecycleHandler"),
            field("StopSignal", "stopSignal", "*core.Signal"),
        ],
    ),
    structure(
        "core.LifecycleHandler",
        &[
            field("Exec", "exec", "*core.ExecAction"),
            field("HTTPGet", "httpGet", "*core.HTTPGetAction"),
            field("TCPSocket", "tcpSocket", "*core.TCPSocketAction"),
            field("Sleep", "sleep", "*core.SleepAction"),
        ],
    ),
    structure(
        "core.LinuxContainerUser",
        &[
            field("UID", "uid", "int64"),
            field("GID", "gid", "int64"),
            field("SupplementalGroups", "supplementalGroups", "[]int64"),
        ],
    ),
    structure("core.LocalObjectReference", &[field("Name", "name", "string")]),
    structure(
        "core.NFSVolumeSource",
        &[
            field("Server", "server", "string"),
            field("Path", "path", "string"),
            field("ReadOnly", "readOnly", "bool"),
        ],
    ),
    structure(
        "core.NodeAffinity",
        &[
            field(
                "RequiredDuringSchedulingIgnoredDuringExecution",
                "requiredDuringSchedulingIgnoredDuringExecution",
                "*core.NodeSelector",
            ),
            field(
                "PreferredDuringSchedulingIgnoredDuringExecution",
                "preferredDuringSchedulingIgnoredDuringExecution",
                "[]core.PreferredSchedulingTerm",
            ),
        ],
    ),
    structure(
        "core.NodeAllocatableMappedResources",
        &[field("Name", "name", "core.ResourceName"), field("Quantity", "quantity", "*resource.Quantity")],
    ),
    structure(
        "core.NodeAllocatableOverheadResources",
        &[
            field("Name", "name", "core.ResourceName"),
            field("PerPod", "perPod", "*resource.Quantity"),
            field("PerContainer", "perContainer", "*resource.Quantity"),
        ],
    ),
    structure(
        "core.NodeAllocatableResourceClaimStatus",
        &[
            field("ResourceClaimName", "resourceClaimName", "string"),
            field("Containers", "containers", "[]string"),
            field("Mapping", "mapping", "[]core.NodeAllocatableMappedResources").since(V1_37),
            field("Overhead", "overhead", "[]core.NodeAllocatableOverheadResources").since(V1_37),
            field("Resources", "resources", "map[core.ResourceName]resource.Quantity").until(V1_36),
        ],
    ),
    structure(
        "core.NodeSelector",
        &[field("NodeSelectorTerms", "nodeSelectorTerms", "[]core.NodeSelectorTerm")],
    ),
    structure(
        "core.NodeSelectorRequirement",
        &[
            field("Key", "key", "string"),
            field("Operator", "operator", "core.NodeSelectorOperator"),
            field("Values", "values", "[]string"),
        ],
    ),
    structure(
        "core.NodeSelectorTerm",
        &[
            field("MatchExpressions", "matchExpressions", "[]core.NodeSelectorRequirement"),
            field("MatchFields", "matchFields", "[]core.NodeSelectorRequirement"),
        ],
    ),
    structure(
        "core.ObjectFieldSelector",
        &[field("APIVersion", "apiVersion", "string"), field("FieldPath", "fieldPath", "string")],
    ),
    structure(
        "core.PersistentVolumeClaimSpec",
        &[
            field("AccessModes", "accessModes", "[]core.PersistentVolumeAccessMode"),
            field("Selector", "selector", "*v1.LabelSelector"),
            field("Resources", "resources", "core.VolumeResourceRequirements"),
            field("VolumeName", "volumeName", "string"),
            field("StorageClassName", "storageClassName", "*string"),
            field("VolumeMode", "volumeMode", "*core.PersistentVolumeMode"),
            field("DataSource", "dataSource", "*core.TypedLocalObjectReference"),
            field("DataSourceRef", "dataSourceRef", "*core.TypedObjectReference"),
            field("VolumeAttributesClassName", "volumeAttributesClassName", "*string"),
        ],
    ),
    structure(
        "core.PersistentVolumeClaimTemplate",
        &[
            field("ObjectMeta", "metadata", "v1.ObjectMeta"),
            field("Spec", "spec", "core.PersistentVolumeClaimSpec"),
        ],
    ),
    structure(
        "core.PersistentVolumeClaimVolumeSource",
        &[field("ClaimName", "claimName", "string"), field("ReadOnly", "readOnly", "bool")],
    ),
    structure(
        "core.PhotonPersistentDiskVolumeSource",
        &[field("PdID", "pdID", "string"), field("FSType", "fsType", "string")],
    ),
    structure(
        "core.Pod",
        &[
            field("TypeMeta", "", "v1.TypeMeta"),
            field("ObjectMeta", "metadata", "v1.ObjectMeta"),
            field("Spec", "spec", "core.PodSpec"),
            field("Status", "status", "core.PodStatus"),
        ],
    ),
    structure(
        "core.PodAffinity",
        &[
            field(
                "RequiredDuringSchedulingIgnoredDuringExecution",
                "requiredDuringSchedulingIgnoredDuringExecution",
                "[]core.PodAffinityTerm",
            ),
            field(
                "PreferredDuringSchedulingIgnoredDuringExecution",
                "preferredDuringSchedulingIgnoredDuringExecution",
                "[]core.WeightedPodAffinityTerm",
            ),
        ],
    ),
    structure(
        "core.PodAffinityTerm",
        &[
            field("LabelSelector", "labelSelector", "*v1.LabelSelector"),
            field("Namespaces", "namespaces", "[]string"),
            field("TopologyKey", "topologyKey", "string"),
            field("NamespaceSelector", "namespaceSelector", "*v1.LabelSelector"),
            field("MatchLabelKeys", "matchLabelKeys", "[]string"),
            field("MismatchLabelKeys", "mismatchLabelKeys", "[]string"),
        ],
    ),
    structure(
        "core.PodAntiAffinity",
        &[
            field(
                "RequiredDuringSchedulingIgnoredDuringExecution",
                "requiredDuringSchedulingIgnoredDuringExecution",
                "[]core.PodAffinityTerm",
            ),
            field(
                "PreferredDuringSchedulingIgnoredDuringExecution",
                "preferredDuringSchedulingIgnoredDuringExecution",
                "[]core.WeightedPodAffinityTerm",
            ),
        ],
    ),
    structure(
        "core.PodCertificateProjection",
        &[
            field("SignerName", "signerName", "string"),
            field("KeyType", "keyType", "string"),
            field("MaxExpirationSeconds", "maxExpirationSeconds", "*int32"),
            field("CredentialBundlePath", "credentialBundlePath", "string"),
            field("KeyPath", "keyPath", "string"),
            field("CertificateChainPath", "certificateChainPath", "string"),
            field("UserAnnotations", "userAnnotations", "map[string]string"),
            field("User", "user", "*int64").since(V1_37),
        ],
    ),
    structure(
        "core.PodCondition",
        &[
            field("Type", "type", "core.PodConditionType"),
            field("ObservedGeneration", "observedGeneration", "int64"),
            field("Status", "status", "core.ConditionStatus"),
            field("LastProbeTime", "lastProbeTime", "v1.Time"),
            field("LastTransitionTime", "lastTransitionTime", "v1.Time"),
            field("Reason", "reason", "string"),
            field("Message", "message", "string"),
        ],
    ),
    structure(
        "core.PodDNSConfig",
        &[
            field("Nameservers", "nameservers", "[]string"),
            field("Searches", "searches", "[]string"),
            field("Options", "options", "[]core.PodDNSConfigOption"),
        ],
    ),
    structure(
        "core.PodDNSConfigOption",
        &[field("Name", "name", "string"), field("Value", "value", "*string")],
    ),
    structure(
        "core.PodExtendedResourceClaimStatus",
        &[
            field("RequestMappings", "requestMappings", "[]core.ContainerExtendedResourceRequest"),
            field("ResourceClaimName", "resourceClaimName", "string"),
        ],
    ),
    structure("core.PodIP", &[field("IP", "ip", "string")]),
    structure("core.PodOS", &[field("Name", "name", "core.OSName")]),
    structure("core.PodReadinessGate", &[field("ConditionType", "conditionType", "core.PodConditionType")]),
    structure(
        "core.PodResourceClaim",
        &[
            field("Name", "name", "string"),
            field("ResourceClaimName", "resourceClaimName", "*string"),
            field("ResourceClaimTemplateName", "resourceClaimTemplateName", "*string"),
        ],
    ),
    structure(
        "core.PodResourceClaimStatus",
        &[field("Name", "name", "string"), field("ResourceClaimName", "resourceClaimName", "*string")],
    ),
    structure("core.PodSchedulingGate", &[field("Name", "name", "string")]),
    structure("core.PodSchedulingGroup", &[field("PodGroupName", "podGroupName", "*string")]),
    structure(
        "core.PodSecurityContext",
        &[
            field("HostNetwork", "hostNetwork", "bool"),
            field("HostPID", "hostPID", "bool"),
            field("HostIPC", "hostIPC", "bool"),
            field("ShareProcessNamespace", "shareProcessNamespace", "*bool"),
            field("HostUsers", "hostUsers", "*bool"),
            field("SELinuxOptions", "seLinuxOptions", "*core.SELinuxOptions"),
            field("WindowsOptions", "windowsOptions", "*core.WindowsSecurityContextOptions"),
            field("RunAsUser", "runAsUser", "*int64"),
            field("RunAsGroup", "runAsGroup", "*int64"),
            field("RunAsNonRoot", "runAsNonRoot", "*bool"),
            field("SupplementalGroups", "supplementalGroups", "[]int64"),
            field("SupplementalGroupsPolicy", "supplementalGroupsPolicy", "*core.SupplementalGroupsPolicy"),
            field("FSGroup", "fsGroup", "*int64"),
            field("FSGroupChangePolicy", "fsGroupChangePolicy", "*core.PodFSGroupChangePolicy"),
            field("Sysctls", "sysctls", "[]core.Sysctl"),
            field("SeccompProfile", "seccompProfile", "*core.SeccompProfile"),
            field("AppArmorProfile", "appArmorProfile", "*core.AppArmorProfile"),
            field("SELinuxChangePolicy", "seLinuxChangePolicy", "*core.PodSELinuxChangePolicy"),
        ],
    )
    .until(V1_36),
    structure(
        "core.PodSecurityContext",
        &[
            field("SELinuxOptions", "seLinuxOptions", "*core.SELinuxOptions"),
            field("WindowsOptions", "windowsOptions", "*core.WindowsSecurityContextOptions"),
            field("RunAsUser", "runAsUser", "*int64"),
            field("RunAsGroup", "runAsGroup", "*int64"),
            field("RunAsNonRoot", "runAsNonRoot", "*bool"),
            field("SupplementalGroups", "supplementalGroups", "[]int64"),
            field("SupplementalGroupsPolicy", "supplementalGroupsPolicy", "*core.SupplementalGroupsPolicy"),
            field("FSGroup", "fsGroup", "*int64"),
            field("Sysctls", "sysctls", "[]core.Sysctl"),
            field("FSGroupChangePolicy", "fsGroupChangePolicy", "*core.PodFSGroupChangePolicy"),
            field("SeccompProfile", "seccompProfile", "*core.SeccompProfile"),
            field("AppArmorProfile", "appArmorProfile", "*core.AppArmorProfile"),
            field("SELinuxChangePolicy", "seLinuxChangePolicy", "*core.PodSELinuxChangePolicy"),
        ],
    )
    .since(V1_37),
    structure(
        "core.PodSpec",
        &[
            field("Volumes", "volumes", "[]core.Volume"),
            field("InitContainers", "initContainers", "[]core.Container"),
            field("Containers", "containers", "[]core.Container"),
            field("EphemeralContainers", "ephemeralContainers", "[]core.EphemeralContainer"),
            field("RestartPolicy", "restartPolicy", "core.RestartPolicy"),
            field("TerminationGracePeriodSeconds", "terminationGracePeriodSeconds", "*int64"),
            field("ActiveDeadlineSeconds", "activeDeadlineSeconds", "*int64"),
            field("DNSPolicy", "dnsPolicy", "core.DNSPolicy"),
            field("NodeSelector", "nodeSelector", "map[string]string"),
            field("ServiceAccountName", "serviceAccountName", "string"),
            field("AutomountServiceAccountToken", "automountServiceAccountToken", "*bool"),
            field("NodeName", "nodeName", "string"),
            field("SecurityContext", "securityContext", "*core.PodSecurityContext"),
            field("ImagePullSecrets", "imagePullSecrets", "[]core.LocalObjectReference"),
            field("Hostname", "hostname", "string"),
            field("Subdomain", "subdomain", "string"),
            field("SetHostnameAsFQDN", "setHostnameAsFQDN", "*bool"),
            field("Affinity", "affinity", "*core.Affinity"),
            field("SchedulerName", "schedulerName", "string"),
            field("Tolerations", "tolerations", "[]core.Toleration"),
            field("HostAliases", "hostAliases", "[]core.HostAlias"),
            field("PriorityClassName", "priorityClassName", "string"),
            field("Priority", "priority", "*int32"),
            field("PreemptionPolicy", "preemptionPolicy", "*core.PreemptionPolicy"),
            field("DNSConfig", "dnsConfig", "*core.PodDNSConfig"),
            field("ReadinessGates", "readinessGates", "[]core.PodReadinessGate"),
            field("RuntimeClassName", "runtimeClassName", "*string"),
            field("Overhead", "overhead", "core.ResourceList"),
            field("EnableServiceLinks", "enableServiceLinks", "*bool"),
            field(
                "TopologySpreadConstraints",
                "topologySpreadConstraints",
                "[]core.TopologySpreadConstraint",
            ),
            field("OS", "os", "*core.PodOS"),
            field("SchedulingGates", "schedulingGates", "[]core.PodSchedulingGate"),
            field("ResourceClaims", "resourceClaims", "[]core.PodResourceClaim"),
            field("Resources", "resources", "*core.ResourceRequirements"),
            field("HostnameOverride", "hostnameOverride", "*string"),
            field("SchedulingGroup", "schedulingGroup", "*core.PodSchedulingGroup").since(V1_36),
            field("WorkloadRef", "workloadRef", "*core.WorkloadReference").until(V1_35),
        ],
    )
    .until(V1_36),
    structure(
        "core.PodSpec",
        &[
            field("Volumes", "volumes", "[]core.Volume"),
            field("InitContainers", "initContainers", "[]core.Container"),
            field("Containers", "containers", "[]core.Container"),
            field("EphemeralContainers", "ephemeralContainers", "[]core.EphemeralContainer"),
            field("RestartPolicy", "restartPolicy", "core.RestartPolicy"),
            field("TerminationGracePeriodSeconds", "terminationGracePeriodSeconds", "*int64"),
            field("ActiveDeadlineSeconds", "activeDeadlineSeconds", "*int64"),
            field("DNSPolicy", "dnsPolicy", "core.DNSPolicy"),
            field("NodeSelector", "nodeSelector", "map[string]string"),
            field("ServiceAccountName", "serviceAccountName", "string"),
            field("DeprecatedServiceAccount", "serviceAccount", "string"),
            field("AutomountServiceAccountToken", "automountServiceAccountToken", "*bool"),
            field("NodeName", "nodeName", "string"),
            field("HostNetwork", "hostNetwork", "bool"),
            field("HostPID", "hostPID", "bool"),
            field("HostIPC", "hostIPC", "bool"),
            field("ShareProcessNamespace", "shareProcessNamespace", "*bool"),
            field("SecurityContext", "securityContext", "*core.PodSecurityContext"),
            field("ImagePullSecrets", "imagePullSecrets", "[]core.LocalObjectReference"),
            field("Hostname", "hostname", "string"),
            field("Subdomain", "subdomain", "string"),
            field("Affinity", "affinity", "*core.Affinity"),
            field("SchedulerName", "schedulerName", "string"),
            field("Tolerations", "tolerations", "[]core.Toleration"),
            field("HostAliases", "hostAliases", "[]core.HostAlias"),
            field("PriorityClassName", "priorityClassName", "string"),
            field("Priority", "priority", "*int32"),
            field("DNSConfig", "dnsConfig", "*core.PodDNSConfig"),
            field("ReadinessGates", "readinessGates", "[]core.PodReadinessGate"),
            field("RuntimeClassName", "runtimeClassName", "*string"),
            field("EnableServiceLinks", "enableServiceLinks", "*bool"),
            field("PreemptionPolicy", "preemptionPolicy", "*core.PreemptionPolicy"),
            field("Overhead", "overhead", "core.ResourceList"),
            field(
                "TopologySpreadConstraints",
                "topologySpreadConstraints",
                "[]core.TopologySpreadConstraint",
            ),
            field("SetHostnameAsFQDN", "setHostnameAsFQDN", "*bool"),
            field("OS", "os", "*core.PodOS"),
            field("HostUsers", "hostUsers", "*bool"),
            field("SchedulingGates", "schedulingGates", "[]core.PodSchedulingGate"),
            field("ResourceClaims", "resourceClaims", "[]core.PodResourceClaim"),
            field("Resources", "resources", "*core.ResourceRequirements"),
            field("HostnameOverride", "hostnameOverride", "*string"),
            field("SchedulingGroup", "schedulingGroup", "*core.PodSchedulingGroup"),
            field("EvictionResponders", "evictionResponders", "[]core.EvictionResponder"),
        ],
    )
    .since(V1_37),
    structure(
        "core.PodStatus",
        &[
            field("ObservedGeneration", "observedGeneration", "int64"),
            field("Phase", "phase", "core.PodPhase"),
            field("Conditions", "conditions", "[]core.PodCondition"),
            field("Message", "message", "string"),
            field("Reason", "reason", "string"),
            field("NominatedNodeName", "nominatedNodeName", "string"),
            field("HostIP", "hostIP", "string"),
            field("HostIPs", "hostIPs", "[]core.HostIP"),
            field("PodIPs", "podIPs", "[]core.PodIP"),
            field("StartTime", "startTime", "*v1.Time"),
            field("QOSClass", "qosClass", "core.PodQOSClass"),
            field("InitContainerStatuses", "initContainerStatuses", "[]core.ContainerStatus"),
            field("ContainerStatuses", "containerStatuses", "[]core.ContainerStatus"),
            field("EphemeralContainerStatuses", "ephemeralContainerStatuses", "[]core.ContainerStatus"),
            field("Resize", "resize", "core.PodResizeStatus"),
            field("ResourceClaimStatuses", "resourceClaimStatuses", "[]core.PodResourceClaimStatus"),
            field(
                "ExtendedResourceClaimStatus",
                "extendedResourceClaimStatus",
                "*core.PodExtendedResourceClaimStatus",
            ),
            field("AllocatedResources", "allocatedResources", "core.ResourceList"),
            field("Resources", "resources", "*core.ResourceRequirements"),
            field(
                "NodeAllocatableResourceClaimStatuses",
                "nodeAllocatableResourceClaimStatuses",
                "[]core.NodeAllocatableResourceClaimStatus",
            )
            .since(V1_36),
        ],
    )
    .until(V1_36),
    structure(
        "core.PodStatus",
        &[
            field("ObservedGeneration", "observedGeneration", "int64"),
            field("Phase", "phase", "core.PodPhase"),
            field("Conditions", "conditions", "[]core.PodCondition"),
            field("Message", "message", "string"),
            field("Reason", "reason", "string"),
            field("NominatedNodeName", "nominatedNodeName", "string"),
            field("HostIP", "hostIP", "string"),
            field("HostIPs", "hostIPs", "[]core.HostIP"),
            field("PodIP", "podIP", "string"),
            field("PodIPs", "podIPs", "[]core.PodIP"),
            field("StartTime", "startTime", "*v1.Time"),
            field("InitContainerStatuses", "initContainerStatuses", "[]core.ContainerStatus"),
            field("ContainerStatuses", "containerStatuses", "[]core.ContainerStatus"),
            field("QOSClass", "qosClass", "core.PodQOSClass"),
            field("EphemeralContainerStatuses", "ephemeralContainerStatuses", "[]core.ContainerStatus"),
            field("Resize", "resize", "core.PodResizeStatus"),
            field("ResourceClaimStatuses", "resourceClaimStatuses", "[]core.PodResourceClaimStatus"),
            field(
                "ExtendedResourceClaimStatus",
                "extendedResourceClaimStatus",
                "*core.PodExtendedResourceClaimStatus",
            ),
            field("AllocatedResources", "allocatedResources", "core.ResourceList"),
            field("Resources", "resources", "*core.ResourceRequirements"),
            field(
                "NodeAllocatableResourceClaimStatuses",
                "nodeAllocatableResourceClaimStatuses",
                "[]core.NodeAllocatableResourceClaimStatus",
            ),
            field("VolumeHealth", "volumeHealth", "[]core.PodVolumeHealth"),
        ],
    )
    .since(V1_37),
    structure(
        "core.PodVolumeHealth",
        &[
            field("Name", "name", "string"),
            field("HealthConditions", "healthConditions", "[]core.VolumeHealthCondition"),
            field("LastTransitionTime", "lastTransitionTime", "v1.Time"),
        ],
    ),
    structure(
        "core.PortworxVolumeSource",
        &[
            field("VolumeID", "volumeID", "string"),
            field("FSType", "fsType", "string"),
            field("ReadOnly", "readOnly", "bool"),
        ],
    ),
    structure(
        "core.PreferredSchedulingTerm",
        &[field("Weight", "weight", "int32"), field("Preference", "preference", "core.NodeSelectorTerm")],
    ),
    structure(
        "core.Probe",
        &[
            field("ProbeHandler", "", "core.ProbeHandler"),
            field("InitialDelaySeconds", "initialDelaySeconds", "int32"),
            field("TimeoutSeconds", "timeoutSeconds", "int32"),
            field("PeriodSeconds", "periodSeconds", "int32"),
            field("SuccessThreshold", "successThreshold", "int32"),
            field("FailureThreshold", "failureThreshold", "int32"),
            field("TerminationGracePeriodSeconds", "terminationGracePeriodSeconds", "*int64"),
        ],
    ),
    structure(
        "core.ProbeHandler",
        &[
            field("Exec", "exec", "*core.ExecAction"),
            field("HTTPGet", "httpGet", "*core.HTTPGetAction"),
            field("TCPSocket", "tcpSocket", "*core.TCPSocketAction"),
            field("GRPC", "grpc", "*core.GRPCAction"),
        ],
    ),
    structure(
        "core.ProjectedVolumeSource",
        &[
            field("Sources", "sources", "[]core.VolumeProjection"),
            field("DefaultMode", "defaultMode", "*int32"),
            field("DefaultUser", "defaultUser", "*int64").since(V1_37),
        ],
    ),
    structure(
        "core.QuobyteVolumeSource",
        &[
            field("Registry", "registry", "string"),
            field("Volume", "volume", "string"),
            field("ReadOnly", "readOnly", "bool"),
            field("User", "user", "string"),
            field("Group", "group", "string"),
            field("Tenant", "tenant", "string"),
        ],
    ),
    structure(
        "core.RBDVolumeSource",
        &[
            field("CephMonitors", "monitors", "[]string"),
            field("RBDImage", "image", "string"),
            field("FSType", "fsType", "string"),
            field("RBDPool", "pool", "string"),
            field("RadosUser", "user", "string"),
            field("Keyring", "keyring", "string"),
            field("SecretRef", "secretRef", "*core.LocalObjectReference"),
            field("ReadOnly", "readOnly", "bool"),
        ],
    ),
    structure(
        "core.ResourceClaim",
        &[field("Name", "name", "string"), field("Request", "request", "string")],
    ),
    structure(
        "core.ResourceFieldSelector",
        &[
            field("ContainerName", "containerName", "string"),
            field("Resource", "resource", "string"),
            field("Divisor", "divisor", "resource.Quantity"),
        ],
    ),
    structure(
        "core.ResourceHealth",
        &[
            field("ResourceID", "resourceID", "core.ResourceID"),
            field("Health", "health", "core.ResourceHealthStatus"),
            field("Message", "message", "*string").since(V1_36),
        ],
    ),
    structure(
        "core.ResourceRequirements",
        &[
            field("Limits", "limits", "core.ResourceList"),
            field("Requests", "requests", "core.ResourceList"),
            field("Claims", "claims", "[]core.ResourceClaim"),
        ],
    ),
    structure(
        "core.ResourceStatus",
        &[
            field("Name", "name", "core.ResourceName"),
            field("Resources", "resources", "[]core.ResourceHealth"),
        ],
    ),
    structure(
        "core.SELinuxOptions",
        &[
            field("User", "user", "string"),
            field("Role", "role", "string"),
            field("Type", "type", "string"),
            field("Level", "level", "string"),
        ],
    ),
    structure(
        "core.ScaleIOVolumeSource",
        &[
            field("Gateway", "gateway", "string"),
            field("System", "system", "string"),
            field("SecretRef", "secretRef", "*core.LocalObjectReference"),
            field("SSLEnabled", "sslEnabled", "bool"),
            field("ProtectionDomain", "protectionDomain", "string"),
            field("StoragePool", "storagePool", "string"),
            field("StorageMode", "storageMode", "string"),
            field("VolumeName", "volumeName", "string"),
            field("FSType", "fsType", "string"),
            field("ReadOnly", "readOnly", "bool"),
        ],
    ),
    structure(
        "core.SeccompProfile",
        &[
            field("Type", "type", "core.SeccompProfileType"),
            field("LocalhostProfile", "localhostProfile", "*string"),
        ],
    ),
    structure(
        "core.SecretEnvSource",
        &[
            field("LocalObjectReference", "", "core.LocalObjectReference"),
            field("Optional", "optional", "*bool"),
        ],
    ),
    structure(
        "core.SecretKeySelector",
        &[
            field("LocalObjectReference", "", "core.LocalObjectReference"),
            field("Key", "key", "string"),
            field("Optional", "optional", "*bool"),
        ],
    ),
    structure(
        "core.SecretProjection",
        &[
            field("LocalObjectReference", "", "core.LocalObjectReference"),
            field("Items", "items", "[]core.KeyToPath"),
            field("Optional", "optional", "*bool"),
        ],
    ),
    structure(
        "core.SecretVolumeSource",
        &[
            field("SecretName", "secretName", "string"),
            field("Items", "items", "[]core.KeyToPath"),
            field("DefaultMode", "defaultMode", "*int32"),
            field("Optional", "optional", "*bool"),
            field("DefaultUser", "defaultUser", "*int64").since(V1_37),
        ],
    ),
    structure(
        "core.SecurityContext",
        &[
            field("Capabilities", "capabilities", "*core.Capabilities"),
            field("Privileged", "privileged", "*bool"),
            field("SELinuxOptions", "seLinuxOptions", "*core.SELinuxOptions"),
            field("WindowsOptions", "windowsOptions", "*core.WindowsSecurityContextOptions"),
            field("RunAsUser", "runAsUser", "*int64"),
            field("RunAsGroup", "runAsGroup", "*int64"),
            field("RunAsNonRoot", "runAsNonRoot", "*bool"),
            field("ReadOnlyRootFilesystem", "readOnlyRootFilesystem", "*bool"),
            field("AllowPrivilegeEscalation", "allowPrivilegeEscalation", "*bool"),
            field("ProcMount", "procMount", "*core.ProcMountType"),
            field("SeccompProfile", "seccompProfile", "*core.SeccompProfile"),
            field("AppArmorProfile", "appArmorProfile", "*core.AppArmorProfile"),
        ],
    ),
    structure(
        "core.ServiceAccountTokenProjection",
        &[
            field("Audience", "audience", "string"),
            field("ExpirationSeconds", "expirationSeconds", "*int64").since(V1_37),
            field("ExpirationSeconds", "expirationSeconds", "int64").until(V1_36),
            field("Path", "path", "string"),
            field("User", "user", "*int64").since(V1_37),
        ],
    ),
    structure("core.SleepAction", &[field("Seconds", "seconds", "int64")]),
    structure(
        "core.StorageOSVolumeSource",
        &[
            field("VolumeName", "volumeName", "string"),
            field("VolumeNamespace", "volumeNamespace", "string"),
            field("FSType", "fsType", "string"),
            field("ReadOnly", "readOnly", "bool"),
            field("SecretRef", "secretRef", "*core.LocalObjectReference"),
        ],
    ),
    structure("core.Sysctl", &[field("Name", "name", "string"), field("Value", "value", "string")]),
    structure(
        "core.TCPSocketAction",
        &[field("Port", "port", "intstr.IntOrString"), field("Host", "host", "string")],
    ),
    structure(
        "core.Toleration",
        &[
            field("Key", "key", "string"),
            field("Operator", "operator", "core.TolerationOperator"),
            field("Value", "value", "string"),
            field("Effect", "effect", "core.TaintEffect"),
            field("TolerationSeconds", "tolerationSeconds", "*int64"),
        ],
    ),
    structure(
        "core.TopologySpreadConstraint",
        &[
            field("MaxSkew", "maxSkew", "int32"),
            field("TopologyKey", "topologyKey", "string"),
            field("WhenUnsatisfiable", "whenUnsatisfiable", "core.UnsatisfiableConstraintAction"),
            field("LabelSelector", "labelSelector", "*v1.LabelSelector"),
            field("MinDomains", "minDomains", "*int32"),
            field("NodeAffinityPolicy", "nodeAffinityPolicy", "*core.NodeInclusionPolicy"),
            field("NodeTaintsPolicy", "nodeTaintsPolicy", "*core.NodeInclusionPolicy"),
            field("MatchLabelKeys", "matchLabelKeys", "[]string"),
        ],
    ),
    structure(
        "core.TypedLocalObjectReference",
        &[
            field("APIGroup", "apiGroup", "*string"),
            field("Kind", "kind", "string"),
            field("Name", "name", "string"),
        ],
    ),
    structure(
        "core.TypedObjectReference",
        &[
            field("APIGroup", "apiGroup", "*string"),
            field("Kind", "kind", "string"),
            field("Name", "name", "string"),
            field("Namespace", "namespace", "*string"),
        ],
    ),
    structure(
        "core.Volume",
        &[field("Name", "name", "string"), field("VolumeSource", "", "core.VolumeSource")],
    ),
    structure(
        "core.VolumeDevice",
        &[field("Name", "name", "string"), field("DevicePath", "devicePath", "string")],
    ),
    structure(
        "core.VolumeHealthCondition",
        &[
            field("Status", "status", "core.VolumeHealthStatusType"),
            field("Reason", "reason", "string"),
            field("Message", "message", "string"),
        ],
    ),
    structure(
        "core.VolumeMount",
        &[
            field("Name", "name", "string"),
            field("ReadOnly", "readOnly", "bool"),
            field("RecursiveReadOnly", "recursiveReadOnly", "*core.RecursiveReadOnlyMode"),
            field("MountPath", "mountPath", "string"),
            field("SubPath", "subPath", "string"),
            field("MountPropagation", "mountPropagation", "*core.MountPropagationMode"),
            field("SubPathExpr", "subPathExpr", "string"),
            field("BindMountOptions", "bindMountOptions", "[]string").since(V1_37),
        ],
    ),
    structure(
        "core.VolumeMountStatus",
        &[
            field("Name", "name", "string"),
            field("MountPath", "mountPath", "string"),
            field("ReadOnly", "readOnly", "bool"),
            field("RecursiveReadOnly", "recursiveReadOnly", "*core.RecursiveReadOnlyMode"),
            field("VolumeStatus", "volumeStatus", "*core.VolumeStatus").since(V1_36),
        ],
    ),
    structure(
        "core.VolumeProjection",
        &[
            field("Secret", "secret", "*core.SecretProjection"),
            field("DownwardAPI", "downwardAPI", "*core.DownwardAPIProjection"),
            field("ConfigMap", "configMap", "*core.ConfigMapProjection"),
            field("ServiceAccountToken", "serviceAccountToken", "*core.ServiceAccountTokenProjection"),
            field("ClusterTrustBundle", "clusterTrustBundle", "*core.ClusterTrustBundleProjection"),
            field("PodCertificate", "podCertificate", "*core.PodCertificateProjection"),
        ],
    ),
    structure(
        "core.VolumeResourceRequirements",
        &[field("Limits", "limits", "core.ResourceList"), field("Requests", "requests", "core.ResourceList")],
    ),
    structure(
        "core.VolumeSource",
        &[
            field("HostPath", "hostPath", "*core.HostPathVolumeSource"),
            field("EmptyDir", "emptyDir", "*core.EmptyDirVolumeSource"),
            field("GCEPersistentDisk", "gcePersistentDisk", "*core.GCEPersistentDiskVolumeSource"),
            field("AWSElasticBlockStore", "awsElasticBlockStore", "*core.AWSElasticBlockStoreVolumeSource"),
            field("GitRepo", "gitRepo", "*core.GitRepoVolumeSource"),
            field("Secret", "secret", "*core.SecretVolumeSource"),
            field("NFS", "nfs", "*core.NFSVolumeSource"),
            field("ISCSI", "iscsi", "*core.ISCSIVolumeSource"),
            field("Glusterfs", "glusterfs", "*core.GlusterfsVolumeSource"),
            field(
                "PersistentVolumeClaim",
                "persistentVolumeClaim",
                "*core.PersistentVolumeClaimVolumeSource",
            ),
            field("RBD", "rbd", "*core.RBDVolumeSource"),
            field("Quobyte", "quobyte", "*core.QuobyteVolumeSource"),
            field("FlexVolume", "flexVolume", "*core.FlexVolumeSource"),
            field("Cinder", "cinder", "*core.CinderVolumeSource"),
            field("CephFS", "cephfs", "*core.CephFSVolumeSource"),
            field("Flocker", "flocker", "*core.FlockerVolumeSource"),
            field("DownwardAPI", "downwardAPI", "*core.DownwardAPIVolumeSource"),
            field("FC", "fc", "*core.FCVolumeSource"),
            field("AzureFile", "azureFile", "*core.AzureFileVolumeSource"),
            field("ConfigMap", "configMap", "*core.ConfigMapVolumeSource"),
            field("VsphereVolume", "vsphereVolume", "*core.VsphereVirtualDiskVolumeSource"),
            field("AzureDisk", "azureDisk", "*core.AzureDiskVolumeSource"),
            field("PhotonPersistentDisk", "photonPersistentDisk", "*core.PhotonPersistentDiskVolumeSource"),
            field("Projected", "projected", "*core.ProjectedVolumeSource"),
            field("PortworxVolume", "portworxVolume", "*core.PortworxVolumeSource"),
            field("ScaleIO", "scaleIO", "*core.ScaleIOVolumeSource"),
            field("StorageOS", "storageos", "*core.StorageOSVolumeSource"),
            field("CSI", "csi", "*core.CSIVolumeSource"),
            field("Ephemeral", "ephemeral", "*core.EphemeralVolumeSource"),
            field("Image", "image", "*core.ImageVolumeSource"),
        ],
    )
    .until(V1_36),
    structure(
        "core.VolumeSource",
        &[
            field("HostPath", "hostPath", "*core.HostPathVolumeSource"),
            field("EmptyDir", "emptyDir", "*core.EmptyDirVolumeSource"),
            field("GCEPersistentDisk", "gcePersistentDisk", "*core.GCEPersistentDiskVolumeSource"),
            field("AWSElasticBlockStore", "awsElasticBlockStore", "*core.AWSElasticBlockStoreVolumeSource"),
            field("GitRepo", "gitRepo", "*core.GitRepoVolumeSource"),
            field("Secret", "secret", "*core.SecretVolumeSource"),
            field("NFS", "nfs", "*core.NFSVolumeSource"),
            field("ISCSI", "iscsi", "*core.ISCSIVolumeSource"),
            field("Glusterfs", "glusterfs", "*core.GlusterfsVolumeSource"),
            field(
                "PersistentVolumeClaim",
                "persistentVolumeClaim",
                "*core.PersistentVolumeClaimVolumeSource",
            ),
            field("RBD", "rbd", "*core.RBDVolumeSource"),
            field("FlexVolume", "flexVolume", "*core.FlexVolumeSource"),
            field("Cinder", "cinder", "*core.CinderVolumeSource"),
            field("CephFS", "cephfs", "*core.CephFSVolumeSource"),
            field("Flocker", "flocker", "*core.FlockerVolumeSource"),
            field("DownwardAPI", "downwardAPI", "*core.DownwardAPIVolumeSource"),
            field("FC", "fc", "*core.FCVolumeSource"),
            field("AzureFile", "azureFile", "*core.AzureFileVolumeSource"),
            field("ConfigMap", "configMap", "*core.ConfigMapVolumeSource"),
            field("VsphereVolume", "vsphereVolume", "*core.VsphereVirtualDiskVolumeSource"),
            field("Quobyte", "quobyte", "*core.QuobyteVolumeSource"),
            field("AzureDisk", "azureDisk", "*core.AzureDiskVolumeSource"),
            field("PhotonPersistentDisk", "photonPersistentDisk", "*core.PhotonPersistentDiskVolumeSource"),
            field("Projected", "projected", "*core.ProjectedVolumeSource"),
            field("PortworxVolume", "portworxVolume", "*core.PortworxVolumeSource"),
            field("ScaleIO", "scaleIO", "*core.ScaleIOVolumeSource"),
            field("StorageOS", "storageos", "*core.StorageOSVolumeSource"),
            field("CSI", "csi", "*core.CSIVolumeSource"),
            field("Ephemeral", "ephemeral", "*core.EphemeralVolumeSource"),
            field("Image", "image", "*core.ImageVolumeSource"),
        ],
    )
    .since(V1_37),
    structure("core.VolumeStatus", &[field("Image", "image", "*core.ImageVolumeStatus")]),
    structure(
        "core.VsphereVirtualDiskVolumeSource",
        &[
            field("VolumePath", "volumePath", "string"),
            field("FSType", "fsType", "string"),
            field("StoragePolicyName", "storagePolicyName", "string"),
            field("StoragePolicyID", "storagePolicyID", "string"),
        ],
    ),
    structure(
        "core.WeightedPodAffinityTerm",
        &[
            field("Weight", "weight", "int32"),
            field("PodAffinityTerm", "podAffinityTerm", "core.PodAffinityTerm"),
        ],
    ),
    structure(
        "core.WindowsSecurityContextOptions",
        &[
            field("GMSACredentialSpecName", "gmsaCredentialSpecName", "*string"),
            field("GMSACredentialSpec", "gmsaCredentialSpec", "*string"),
            field("RunAsUserName", "runAsUserName", "*string"),
            field("HostProcess", "hostProcess", "*bool"),
        ],
    ),
    structure(
        "core.WorkloadReference",
        &[
            field("Name", "name", "string"),
            field("PodGroup", "podGroup", "string"),
            field("PodGroupReplicaKey", "podGroupReplicaKey", "string"),
        ],
    ),
    structure(
        "v1.LabelSelector",
        &[
            field("MatchLabels", "matchLabels", "map[string]string"),
            field("MatchExpressions", "matchExpressions", "[]v1.LabelSelectorRequirement"),
        ],
    ),
    structure(
        "v1.LabelSelectorRequirement",
        &[
            field("Key", "key", "string"),
            field("Operator", "operator", "v1.LabelSelectorOperator"),
            field("Values", "values", "[]string"),
        ],
    ),
    structure(
        "v1.ManagedFieldsEntry",
        &[
            field("Manager", "manager", "string"),
            field("Operation", "operation", "v1.ManagedFieldsOperationType"),
            field("APIVersion", "apiVersion", "string"),
            field("Time", "time", "*v1.Time"),
            field("FieldsType", "fieldsType", "string"),
            field("FieldsV1", "fieldsV1", "*v1.FieldsV1"),
            field("Subresource", "subresource", "string"),
        ],
    ),
    structure(
        "v1.ObjectMeta",
        &[
            field("Name", "name", "string"),
            field("GenerateName", "generateName", "string"),
            field("Namespace", "namespace", "string"),
            field("SelfLink", "selfLink", "string"),
            field("UID", "uid", "types.UID"),
            field("ResourceVersion", "resourceVersion", "string"),
            field("Generation", "generation", "int64"),
            field("CreationTimestamp", "creationTimestamp", "v1.Time"),
            field("DeletionTimestamp", "deletionTimestamp", "*v1.Time"),
            field("DeletionGracePeriodSeconds", "deletionGracePeriodSeconds", "*int64"),
            field("Labels", "labels", "map[string]string"),
            field("Annotations", "annotations", "map[string]string"),
            field("OwnerReferences", "ownerReferences", "[]v1.OwnerReference"),
            field("Finalizers", "finalizers", "[]string"),
            field("ManagedFields", "managedFields", "[]v1.ManagedFieldsEntry"),
        ],
    ),
    structure(
        "v1.OwnerReference",
        &[
            field("APIVersion", "apiVersion", "string"),
            field("Kind", "kind", "string"),
            field("Name", "name", "string"),
            field("UID", "uid", "types.UID"),
            field("Controller", "controller", "*bool"),
            field("BlockOwnerDeletion", "blockOwnerDeletion", "*bool"),
        ],
    ),
    structure("v1.TypeMeta", &[field("Kind", "kind", "string"), field("APIVersion", "apiVersion", "string")]),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_struct_of_the_table_is_found_in_each_version_that_has_it_and_no_other_type_is() {
        for structure in STRUCTURES {
            for version in KubeletVersion::ALL.into_iter().filter(|version| structure.is_in(*version)) {
                let is_it = |other: &Structure| other.name == structure.name && other.is_in(version);
                assert!(find(structure.name, version).is_some_and(is_it), "{}", structure.name);
                let many = STRUCTURES.iter().filter(|other| is_it(other)).count();
                assert_eq!(many, 1, "{}", structure.name);
            }
        }
        for other in ["", "*core.Pod", "core.PodPhase", "core.Po", "core.Podd", "string", "zzz"] {
            assert!(find(other, KubeletVersion::NEWEST).is_none(), "{other}");
        }
    }
}
