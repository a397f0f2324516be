//! Computes the environment variables of a container (`pkg/kubelet: makeEnvironmentVariables`).

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{
    ConfigMap, Container, EnvVar, EnvVarSource, ObjectFieldSelector, Pod, Secret, Service,
};
use pod_sync_layout::{NodeSettings, ObjectError, ObjectSource};
use quintlet_model::pod;

use super::env_files::EnvFiles;
use super::error::ConfigError;
use super::expand::{Budget, expand, expand_known, expand_text};
use super::fields::{ResourceField, metadata_field, resource_field};
use super::services::{MASTER_NAMESPACE, service_variables};

/// The API objects that a container's variables refer to, fetched once per start. Each has its own error.
#[derive(Debug, Clone, Default)]
pub struct EnvObjects {
    /// ConfigMaps by name.
    pub config_maps: BTreeMap<String, Result<Arc<ConfigMap>, ObjectError>>,
    /// Secrets by name.
    pub secrets: BTreeMap<String, Result<Arc<Secret>, ObjectError>>,
    /// Services of the pod's namespace and of `default`; `None` until they have been listed.
    pub services: Option<Vec<Arc<Service>>>,
}

impl EnvObjects {
    /// Fetches every object that `container` refers to.
    pub async fn fetch(pod: &Pod, container: &Container, source: &dyn ObjectSource) -> Self {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or("default");
        let mut out = Self::default();
        for env_source in container.env_from.iter().flatten() {
            if let Some(r) = &env_source.config_map_ref {
                out.want_config_map(namespace, &r.name, source).await;
            }
            if let Some(r) = &env_source.secret_ref {
                out.want_secret(namespace, &r.name, source).await;
            }
        }
        for value in container.env.iter().flatten().filter_map(|e| e.value_from.as_ref()) {
            if let Some(r) = &value.config_map_key_ref {
                out.want_config_map(namespace, &r.name, source).await;
            }
            if let Some(r) = &value.secret_key_ref {
                out.want_secret(namespace, &r.name, source).await;
            }
        }
        out.services = services(namespace, source).await;
        out
    }

    async fn want_config_map(&mut self, namespace: &str, name: &str, source: &dyn ObjectSource) {
        if !self.config_maps.contains_key(name) {
            let got = source.config_map(namespace, name).await;
            self.config_maps.insert(name.to_owned(), got);
        }
    }

    async fn want_secret(&mut self, namespace: &str, name: &str, source: &dyn ObjectSource) {
        if !self.secrets.contains_key(name) {
            let got = source.secret(namespace, name).await;
            self.secrets.insert(name.to_owned(), got);
        }
    }

    fn config_map(&self, name: &str, optional: bool) -> Result<Option<&ConfigMap>, ConfigError> {
        get(&self.config_maps, name, optional)
    }

    fn secret(&self, name: &str, optional: bool) -> Result<Option<&Secret>, ConfigError> {
        get(&self.secrets, name, optional)
    }
}

async fn services(namespace: &str, source: &dyn ObjectSource) -> Option<Vec<Arc<Service>>> {
    let mut all = source.services(namespace).await.ok()?;
    if namespace != MASTER_NAMESPACE {
        all.extend(source.services(MASTER_NAMESPACE).await.ok()?);
    }
    Some(all)
}

fn get<'a, T>(
    objects: &'a BTreeMap<String, Result<Arc<T>, ObjectError>>,
    name: &str,
    optional: bool,
) -> Result<Option<&'a T>, ConfigError> {
    match objects.get(name) {
        Some(Ok(object)) => Ok(Some(object)),
        Some(Err(e)) if optional && e.is_not_found() => Ok(None),
        Some(Err(e)) => Err(ConfigError::Object(e.clone())),
        None => Err(ConfigError::invalid(format!("object {name:?} was not asked for"))),
    }
}

/// Environment variables of a container, by name. A value need not be text.
pub type Env = BTreeMap<String, Vec<u8>>;

/// Input of [`make_env`].
#[derive(Debug, Clone, Copy)]
pub struct EnvInput<'a> {
    /// The pod, whose fields variables refer to.
    pub pod: &'a Pod,
    /// The container with the variables.
    pub container: &'a Container,
    /// Directories and settings of the node.
    pub node: &'a NodeSettings,
    /// IP addresses of the sandbox, the primary one first.
    pub pod_ips: &'a [IpAddr],
    /// The objects that the variables refer to.
    pub objects: &'a EnvObjects,
}

/// Returns the environment variables of a container, by name. `files` has those that its variables refer to.
///
/// # Errors
/// The message is for the user; see [`ConfigError`].
pub fn make_env(input: EnvInput<'_>, mut files: EnvFiles) -> Result<Env, ConfigError> {
    let spec = pod::spec(input.pod);
    let links = spec.enable_service_links.ok_or_else(|| {
        ConfigError::invalid("nil pod.spec.enableServiceLinks encountered, cannot construct envvars")
    })?;
    let known = match &input.objects.services {
        Some(services) => services.as_slice(),
        None if pod::is_static(input.pod) => &[],
        None => return Err(ConfigError::ServicesNotReady),
    };
    let namespace = input.pod.metadata.namespace.as_deref().unwrap_or("default");
    let services = service_variables(known, namespace, links);

    let mut budget = Budget::new("the environment variables");
    let mut env = env_from(input, &mut budget)?;
    for var in input.container.env.iter().flatten() {
        if let Some(value) = variable(input, var, &env, &services, &mut budget, &mut files)? {
            env.insert(var.name.clone(), value);
        }
    }
    for (name, value) in services {
        env.entry(name).or_insert_with(|| value.into_bytes());
    }
    Ok(env)
}

fn env_from(input: EnvInput<'_>, budget: &mut Budget) -> Result<Env, ConfigError> {
    let mut env = Env::new();
    for env_source in input.container.env_from.iter().flatten() {
        let prefix = env_source.prefix.as_deref().unwrap_or_default();
        if let Some(r) = &env_source.config_map_ref
            && let Some(map) = input.objects.config_map(&r.name, r.optional.unwrap_or(false))?
        {
            for (k, v) in map.data.iter().flatten() {
                budget.take(prefix.len().saturating_add(k.len()).saturating_add(v.len()))?;
                env.insert(format!("{prefix}{k}"), v.clone().into_bytes());
            }
        }
        if let Some(r) = &env_source.secret_ref
            && let Some(secret) = input.objects.secret(&r.name, r.optional.unwrap_or(false))?
        {
            for (k, v) in secret.data.iter().flatten() {
                budget.take(prefix.len().saturating_add(k.len()).saturating_add(v.0.len()))?;
                env.insert(format!("{prefix}{k}"), v.0.clone());
            }
        }
    }
    Ok(env)
}

fn variable(
    input: EnvInput<'_>,
    var: &EnvVar,
    env: &Env,
    services: &BTreeMap<String, String>,
    budget: &mut Budget,
    files: &mut EnvFiles,
) -> Result<Option<Vec<u8>>, ConfigError> {
    let literal = var.value.as_deref().unwrap_or_default();
    if !literal.is_empty() {
        let service = |name: &str| services.get(name).map(String::as_bytes);
        let look = |name: &str| env.get(name).map(Vec::as_slice).or_else(|| service(name));
        return expand_known(literal, budget, look).map(Some);
    }
    let Some(source) = &var.value_from else { return Ok(Some(Vec::new())) };
    let value = from_source(input, source, files)?;
    budget.take(value.as_ref().map_or(0, Vec::len))?;
    Ok(value)
}

fn from_source(
    input: EnvInput<'_>,
    source: &EnvVarSource,
    files: &mut EnvFiles,
) -> Result<Option<Vec<u8>>, ConfigError> {
    let namespace = input.pod.metadata.namespace.as_deref().unwrap_or("default");
    if let Some(field) = &source.field_ref {
        return pod_field(input, field).map(|value| Some(value.into_bytes()));
    }
    if let Some(selector) = &source.resource_field_ref {
        let field = ResourceField {
            pod: input.pod,
            own: Some(input.container),
            allocatable: &input.node.allocatable,
        };
        return resource_field(field, selector).map(|value| Some(value.into_bytes()));
    }
    if let Some(r) = &source.config_map_key_ref {
        let optional = r.optional.unwrap_or(false);
        let Some(map) = input.objects.config_map(&r.name, optional)? else { return Ok(None) };
        return match map.data.as_ref().and_then(|d| d.get(&r.key)) {
            Some(value) => Ok(Some(value.clone().into_bytes())),
            None if optional => Ok(None),
            None => Err(ConfigError::invalid(format!(
                "couldn't find key {} in ConfigMap {namespace}/{}",
                r.key, r.name
            ))),
        };
    }
    if let Some(r) = &source.secret_key_ref {
        let optional = r.optional.unwrap_or(false);
        let Some(secret) = input.objects.secret(&r.name, optional)? else { return Ok(None) };
        return match secret.data.as_ref().and_then(|d| d.get(&r.key)) {
            Some(value) => Ok(Some(value.0.clone())),
            None if optional => Ok(None),
            None => Err(ConfigError::invalid(format!(
                "couldn't find key {} in Secret {namespace}/{}",
                r.key, r.name
            ))),
        };
    }
    if let Some(r) = &source.file_key_ref {
        return files.value(r);
    }
    Ok(Some(Vec::new()))
}

fn pod_field(input: EnvInput<'_>, field: &ObjectFieldSelector) -> Result<String, ConfigError> {
    let spec = pod::spec(input.pod);
    let node_ips = input.node.node_ips.get();
    let ips = || -> &[IpAddr] {
        if input.pod_ips.is_empty() && pod::host_network(input.pod) { &node_ips } else { input.pod_ips }
    };
    let pod_ips = || sort_pod_ips(ips(), node_ips.first().copied());
    let joined = |all: &[IpAddr]| all.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    Ok(match field.field_path.as_str() {
        // `pkg/apis/core/pods: ConvertDownwardAPIFieldLabel`
        "spec.nodeName" | "spec.host" => {
            spec.node_name.clone().unwrap_or_else(|| input.node.node_name.clone())
        }
        "spec.serviceAccountName" => spec.service_account_name.clone().unwrap_or_default(),
        // `pkg/util/node: GetNodeHostIPs`
        "status.hostIP" | "status.hostIPs" if node_ips.is_empty() => {
            return Err(ConfigError::invalid("host IP unknown; known addresses: []"));
        }
        "status.hostIP" => joined(node_ips.get(..1).unwrap_or_default()),
        "status.hostIPs" => joined(&node_ips),
        "status.podIP" => pod_ips().first().map(ToString::to_string).unwrap_or_default(),
        "status.podIPs" => joined(&pod_ips()),
        path => metadata_field(input.pod, path)?,
    })
}

/// Returns one IP address of each family, that of the node's primary family first
/// (`pkg/kubelet: sortPodIPs`).
#[must_use]
pub fn sort_pod_ips(pod_ips: &[IpAddr], node_ip: Option<IpAddr>) -> Vec<IpAddr> {
    let v4_first = node_ip.is_none_or(|ip| ip.is_ipv4());
    let first_ip = |v4: bool| pod_ips.iter().find(move |ip| ip.is_ipv4() == v4).copied();
    [first_ip(v4_first), first_ip(!v4_first)].into_iter().flatten().collect()
}

/// Expands a command or argument with the container's variables. In the CRI it is text, unlike a variable.
///
/// # Errors
/// The result exceeds the budget or is not UTF-8.
pub fn expand_argument(argument: &str, env: &Env, budget: &mut Budget) -> Result<String, ConfigError> {
    expand_text(argument, budget, |name| env.get(name).map(Vec::as_slice))
}

/// Expands a `subPathExpr`. Variables must be set and not empty.
///
/// # Errors
/// `missing value for a, b`, or the result exceeds the budget or is not UTF-8.
pub fn expand_sub_path(expression: &str, env: &Env) -> Result<String, ConfigError> {
    let mut missing = std::collections::BTreeSet::new();
    let mut budget = Budget::new("the subPathExpr");
    let out = expand(expression, &mut budget, |name| match env.get(name) {
        Some(value) if !value.is_empty() => value.clone(),
        Some(_) | None => {
            missing.insert(name.to_owned());
            Vec::new()
        }
    })?;
    if missing.is_empty() {
        return budget.text(out);
    }
    let names: Vec<String> = missing.into_iter().collect();
    Err(ConfigError::invalid(format!("missing value for {}", names.join(", "))))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use pod_sync_layout::ObjectKind;
    use quintlet_testkit::pods::pod_of;
    use serde_json::{Value, json};

    struct Case {
        node: NodeSettings,
        ips: Vec<IpAddr>,
        objects: EnvObjects,
        paths: BTreeMap<String, PathBuf>,
        static_pod: bool,
    }

    impl Default for Case {
        fn default() -> Self {
            let node = NodeSettings {
                node_name: "n1".into(),
                node_ips: vec!["192.168.0.1".parse().unwrap(), "fd00::1".parse().unwrap()].into(),
                ..NodeSettings::default()
            };
            let map = json!({"data": {"k": "v", "two": "2"}, "binaryData": {"b": "AAA="}});
            let secret = json!({"data": {"pw": "c2VjcmV0", "raw": "/w=="}});
            let service = json!({"metadata": {"name": "db", "namespace": "default"},
                "spec": {"clusterIP": "10.0.0.9", "ports": [{"port": 1}]}});
            let not_found = |kind| ObjectError::NotFound { kind, name: "gone".into() };
            Self {
                node,
                ips: vec!["fd00::5".parse().unwrap(), "10.0.0.5".parse().unwrap()],
                objects: EnvObjects {
                    config_maps: [
                        ("cm".to_owned(), Ok(Arc::new(serde_json::from_value(map).unwrap()))),
                        ("gone".to_owned(), Err(not_found(ObjectKind::ConfigMap))),
                        ("slow".to_owned(), Err(ObjectError::NotReady { kind: ObjectKind::ConfigMap })),
                    ]
                    .into(),
                    secrets: [
                        ("s".to_owned(), Ok(Arc::new(serde_json::from_value(secret).unwrap()))),
                        ("gone".to_owned(), Err(not_found(ObjectKind::Secret))),
                    ]
                    .into(),
                    services: Some(vec![Arc::new(serde_json::from_value(service).unwrap())]),
                },
                paths: BTreeMap::new(),
                static_pod: false,
            }
        }
    }

    impl Case {
        fn run(&self, container: Value) -> Result<BTreeMap<String, String>, String> {
            let text = |(name, value)| (name, String::from_utf8(value).unwrap());
            self.bytes(container).map(|env| env.into_iter().map(text).collect())
        }

        fn bytes(&self, container: Value) -> Result<Env, String> {
            let mut p = pod_of(json!({"containers": [container], "serviceAccountName": "sa",
                "volumes": [{"name": "v", "emptyDir": {}}, {"name": "h", "hostPath": {"path": "/"}}]}));
            if self.static_pod {
                p.metadata.annotations = Some([("kubernetes.io/config.source".into(), "file".into())].into());
            }
            let container = &p.spec.as_ref().unwrap().containers[0];
            let files = EnvFiles::read(&p, container, &self.paths);
            let input =
                EnvInput { pod: &p, container, node: &self.node, pod_ips: &self.ips, objects: &self.objects };
            make_env(input, files).map_err(|e| e.to_string())
        }

        fn one(&self, source: Value) -> Result<Option<String>, String> {
            let got = self.run(json!({"name": "c", "env": [{"name": "X", "valueFrom": source}]}));
            got.map(|env| env.get("X").cloned())
        }
    }

    #[test]
    fn variables_that_expand_exponentially_or_repeat_an_object_are_limited() {
        let mut env = vec![json!({"name": "V0", "value": "x".repeat(1000)})];
        env.extend(
            (1..40).map(|n| json!({"name": format!("V{n}"), "value": format!("$(V{})", n - 1).repeat(10)})),
        );
        let want = "the environment variables take more than 6291456 bytes";
        assert_eq!(Case::default().run(json!({"name": "c", "env": env})).unwrap_err(), want);

        let mut case = Case::default();
        let large: ConfigMap = serde_json::from_value(json!({"data": {"k": "x".repeat(1 << 20)}})).unwrap();
        case.objects.config_maps.insert("cm".to_owned(), Ok(Arc::new(large)));
        let variable = |n: usize| json!({"name": format!("V{n}"), "valueFrom": {"configMapKeyRef": {"name": "cm", "key": "k"}}});
        let with = |n: usize| case.run(json!({"name": "c", "env": (0..n).map(variable).collect::<Vec<_>>()}));
        assert_eq!(with(5).unwrap().len(), 5 + Case::default().run(json!({"name": "c"})).unwrap().len());
        assert_eq!(with(10_000).unwrap_err(), want);
        let env_sources: Vec<Value> =
            (0..100).map(|n| json!({"prefix": format!("P{n}"), "configMapRef": {"name": "cm"}})).collect();
        assert_eq!(case.run(json!({"name": "c", "envFrom": env_sources})).unwrap_err(), want);
    }

    #[test]
    fn variables_come_in_the_order_of_the_kubelet() {
        let env = Case::default()
            .run(json!({"name": "c",
            "envFrom": [{"configMapRef": {"name": "cm"}}, {"prefix": "P_", "configMapRef": {"name": "cm"}},
                {"secretRef": {"name": "gone", "optional": true}}],
            "env": [
                {"name": "A", "value": "1"},
                {"name": "B", "value": "$(A)-$(k)-$(P_two)-$(LATER)-$(DB_SERVICE_HOST)-$$(A)"},
                {"name": "LATER", "value": "x"},
                {"name": "A", "value": "2"},
                {"name": "EMPTY"},
                {"name": "k", "value": "own"},
                {"name": "DB_SERVICE_PORT", "value": "mine"},
            ]}))
            .unwrap();
        assert_eq!(env["B"], "1-v-2-$(LATER)-10.0.0.9-$(A)");
        assert_eq!(env["A"], "2");
        assert_eq!(env["EMPTY"], "");
        assert_eq!(env["k"], "own");
        assert_eq!(env["P_k"], "v");
        assert!(!env.contains_key("b"), "binaryData is no variable");
        assert_eq!(env["DB_SERVICE_PORT"], "mine");
        assert_eq!(env["DB_SERVICE_HOST"], "10.0.0.9");
    }

    #[test]
    fn a_variable_reference_has_a_value_none_or_the_kubelets_error() {
        let case = Case::default();
        let field = |path: &str| json!({"fieldRef": {"fieldPath": path}});
        let map = |name: &str, key: &str, optional: bool| json!({"configMapKeyRef": {"name": name, "key": key, "optional": optional}});
        let secret = |name: &str, key: &str, optional: bool| json!({"secretKeyRef": {"name": name, "key": key, "optional": optional}});
        for (source, want) in [
            (field("metadata.name"), Ok(Some("web"))),
            (field("spec.nodeName"), Ok(Some("n1"))),
            (field("spec.host"), Ok(Some("n1"))),
            (field("spec.serviceAccountName"), Ok(Some("sa"))),
            (field("status.hostIP"), Ok(Some("192.168.0.1"))),
            (field("status.hostIPs"), Ok(Some("192.168.0.1,fd00::1"))),
            (field("status.podIP"), Ok(Some("10.0.0.5"))),
            (field("status.podIPs"), Ok(Some("10.0.0.5,fd00::5"))),
            (field("status.phase"), Err("unsupported fieldPath: status.phase")),
            (json!({"resourceFieldRef": {"resource": "requests.cpu"}}), Ok(Some("0"))),
            (json!({"resourceFieldRef": {"resource": "x"}}), Err("unsupported container resource : x")),
            (map("cm", "k", false), Ok(Some("v"))),
            (map("cm", "none", false), Err("couldn't find key none in ConfigMap default/cm")),
            (map("cm", "none", true), Ok(None)),
            (map("gone", "k", false), Err("configmap \"gone\" not found")),
            (map("gone", "k", true), Ok(None)),
            (
                map("slow", "k", true),
                Err("failed to sync configmap cache: timed out waiting for the condition"),
            ),
            (secret("s", "pw", false), Ok(Some("secret"))),
            (secret("s", "none", false), Err("couldn't find key none in Secret default/s")),
            (secret("gone", "k", false), Err("secret \"gone\" not found")),
            (secret("gone", "k", true), Ok(None)),
        ] {
            let got = case.one(source.clone());
            assert_eq!(got.as_ref().map(Option::as_deref).map_err(String::as_str), want, "{source}");
        }
    }

    #[test]
    fn a_variable_from_a_secret_is_bytes_also_where_another_variable_refers_to_it() {
        let case = Case::default();
        let key = json!({"secretKeyRef": {"name": "s", "key": "raw"}});
        let env = case.bytes(json!({"name": "c",
            "envFrom": [{"prefix": "ALL_", "secretRef": {"name": "s"}}],
            "env": [{"name": "ONE", "valueFrom": key}, {"name": "TWO", "value": "<$(ONE)|$(ALL_raw)>"}]}));
        let env = env.unwrap();
        for (name, want) in
            [("ONE", &b"\xff"[..]), ("ALL_raw", b"\xff"), ("ALL_pw", b"secret"), ("TWO", b"<\xff|\xff>")]
        {
            assert_eq!(env[name], want, "{name}");
        }
        let error = expand_argument("$(TWO)", &env, &mut Budget::new("command and args")).unwrap_err();
        assert_eq!(error.to_string(), "command and args: a variable that is expanded is not UTF-8 text");
        let error = expand_sub_path("$(ONE)", &env).unwrap_err();
        assert_eq!(error.to_string(), "the subPathExpr: a variable that is expanded is not UTF-8 text");
    }

    #[test]
    fn a_container_that_refers_to_the_host_ip_waits_until_the_node_has_an_address() {
        let mut case = Case::default();
        case.node.node_ips = Vec::new().into();
        for path in ["status.hostIP", "status.hostIPs"] {
            let got = case.one(json!({"fieldRef": {"fieldPath": path}}));
            assert_eq!(got.unwrap_err(), "host IP unknown; known addresses: []", "{path}");
        }
        assert_eq!(case.one(json!({"fieldRef": {"fieldPath": "spec.nodeName"}})), Ok(Some("n1".into())));
    }

    #[test]
    fn a_pod_waits_for_services_unless_it_is_static() {
        let mut case = Case::default();
        case.objects.services = None;
        assert_eq!(
            case.run(json!({"name": "c"})).unwrap_err(),
            "services have not yet been read at least once, cannot construct envvars"
        );
        case.static_pod = true;
        assert!(case.run(json!({"name": "c"})).unwrap().is_empty());
        let mut p = pod_of(json!({"containers": [{"name": "c"}]}));
        p.spec.as_mut().unwrap().enable_service_links = None;
        let input = EnvInput {
            pod: &p,
            container: &p.spec.as_ref().unwrap().containers[0],
            node: &case.node,
            pod_ips: &[],
            objects: &case.objects,
        };
        let got = make_env(input, EnvFiles::default());
        assert_eq!(
            got.unwrap_err().to_string(),
            "nil pod.spec.enableServiceLinks encountered, cannot construct envvars"
        );
    }

    #[test]
    fn a_file_key_reference_is_read_from_an_empty_dir() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("f"), "A='1'\nA='2'\nE=''\n").unwrap();
        std::fs::write(dir.path().join("bad"), "A=1\n").unwrap();
        std::os::unix::fs::symlink("/etc/passwd", dir.path().join("out")).unwrap();
        let mut case = Case::default();
        for name in ["v", "h"] {
            case.paths.insert(name.into(), dir.path().into());
        }
        let ask = |volume: &str, path: &str, key: &str, optional: bool| {
            case.one(
                json!({"fileKeyRef": {"volumeName": volume, "path": path, "key": key, "optional": optional}}),
            )
        };
        assert_eq!(ask("v", "f", "A", false), Ok(Some("1".into())));
        assert_eq!(ask("v", "f", "B", true), Ok(None));
        assert_eq!(ask("v", "f", "E", true), Ok(None));
        assert_eq!(
            ask("v", "f", "B", false).unwrap_err(),
            "environment variable key \"B\" not found in file \"f\""
        );
        assert!(ask("v", "bad", "A", false).unwrap_err().starts_with("couldn't parse env file"));
        assert_eq!(ask("v", "none", "A", true), Ok(None));
        assert_eq!(
            ask("v", "out", "root", true).unwrap_err(),
            "couldn't parse env file: out leaves its volume"
        );
        for name in ["w", "h"] {
            assert_eq!(
                ask(name, "f", "A", false).unwrap_err(),
                format!("cannot find the volume {name:?} referenced by FileKeyRef")
            );
        }
    }

    #[test]
    fn a_sub_path_error_names_every_missing_variable() {
        let env = [("A".to_owned(), b"a".to_vec()), ("E".to_owned(), Vec::new())].into();
        assert_eq!(expand_sub_path("x/$(A)", &env).unwrap(), "x/a");
        assert_eq!(
            expand_sub_path("$(Z)/$(E)/$(B)", &env).unwrap_err().to_string(),
            "missing value for B, E, Z"
        );
    }
}
