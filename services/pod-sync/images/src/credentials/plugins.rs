//! Exec credential providers: programs that return credentials for an image (`pkg/credentialprovider/plugin`).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use quintlet_kit::clock::Clock;
use quintlet_kit::task;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::{Semaphore, watch};

use super::keyring::{self, Credential, Keyring};
use pod_sync_decisions::image_access::ImagePullServiceAccount;
use pod_sync_decisions::image_name;

/// Timeout of a plugin (`pkg/credentialprovider/plugin: ExecPlugin`).
const LIMIT: Duration = Duration::from_secs(60);
/// Responses in the cache. Usually there is one per registry.
const CACHED: usize = 256;
/// Concurrent processes of one plugin.
const RUNS: usize = 16;
/// Size limit of a response, in bytes. Credentials take a few thousand.
const MAX_ANSWER: u64 = 1 << 20;
/// Bytes of stderr that an error quotes. The rest is discarded.
const MAX_SAID: u64 = 256;
const API_GROUP: &str = "credentialprovider.kubelet.k8s.io";

/// The file of `--image-credential-provider-config`.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ConfigFile {
    api_version: String,
    kind: String,
    providers: Vec<ProviderConfig>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ProviderConfig {
    name: String,
    match_images: Vec<String>,
    default_cache_duration: String,
    api_version: String,
    #[serde(default)]
    args: Vec<String>,
    #[serde(default)]
    env: Vec<EnvVar>,
    token_attributes: Option<TokenAttributes>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct EnvVar {
    name: String,
    value: String,
}

/// Requirements of a plugin on the pod's service account (`ServiceAccountTokenAttributes`).
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TokenAttributes {
    /// Audience of the token.
    pub service_account_token_audience: String,
    /// `ServiceAccount` or `Token`: the cache key of a response.
    pub cache_type: String,
    /// The plugin is skipped for pods without a service account.
    pub require_service_account: bool,
    /// Annotations of the account that must exist, or the plugin is skipped.
    #[serde(default)]
    pub required_service_account_annotation_keys: Vec<String>,
    /// Annotations of the account that are sent if they exist.
    #[serde(default)]
    pub optional_service_account_annotation_keys: Vec<String>,
}

impl TokenAttributes {
    /// Returns whether annotations of the account are needed.
    #[must_use]
    pub fn wants_annotations(&self) -> bool {
        !self.required_service_account_annotation_keys.is_empty()
            || !self.optional_service_account_annotation_keys.is_empty()
    }

    /// Returns the annotations to send; `None` if a required one is missing.
    #[must_use]
    pub fn select(&self, all: &BTreeMap<String, String>) -> Option<BTreeMap<String, String>> {
        let of = |keys: &[String]| {
            let found = keys.iter().filter_map(|k| Some((k.clone(), all.get(k)?.clone())));
            found.collect::<BTreeMap<_, _>>()
        };
        let mut told = of(&self.required_service_account_annotation_keys);
        if told.len() < self.required_service_account_annotation_keys.len() {
            return None;
        }
        told.extend(of(&self.optional_service_account_annotation_keys));
        Some(told)
    }

    fn check(&self) -> Result<(), String> {
        if self.service_account_token_audience.is_empty() {
            return Err("serviceAccountTokenAudience is empty".to_owned());
        }
        if !["ServiceAccount", "Token"].contains(&self.cache_type.as_str()) {
            return Err("cacheType is not ServiceAccount or Token".to_owned());
        }
        if !self.require_service_account && !self.required_service_account_annotation_keys.is_empty() {
            let why =
                "requiredServiceAccountAnnotationKeys cannot be set where requireServiceAccount is false";
            return Err(why.to_owned());
        }
        let mut seen = BTreeSet::new();
        let keys = self.required_service_account_annotation_keys.iter();
        match keys.chain(&self.optional_service_account_annotation_keys).find(|k| !seen.insert(*k)) {
            Some(twice) => Err(format!("the annotation key {twice:?} is there twice")),
            None => Ok(()),
        }
    }
}

/// The configuration of plugins is invalid.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {problem}", path = path.display())]
pub struct ConfigError {
    path: PathBuf,
    problem: String,
}

/// A pod's service account, for a plugin that uses it.
#[derive(Clone, Default)]
pub struct PluginAccount {
    /// A token for the plugin's audience.
    pub token: String,
    pub account: ImagePullServiceAccount,
    /// Annotations that the plugin requested.
    pub annotations: BTreeMap<String, String>,
}

impl PluginAccount {
    // Cache key of the account. Other annotations make another key.
    fn key(&self) -> String {
        let ImagePullServiceAccount { uid, namespace, name } = &self.account;
        let annotations = json!(self.annotations);
        format!("{namespace}/{name}\0{uid}\0{annotations}")
    }
}

/// Service accounts by index of the plugin in the configuration. `None`: the plugin is skipped for this pod.
pub type PluginAccounts = BTreeMap<usize, Option<PluginAccount>>;

#[derive(Debug)]
struct Plugin {
    config: ProviderConfig,
    program: PathBuf,
    default_cache: Duration,
    state: Mutex<State>,
    runs: Semaphore,
}

/// Cached responses and processes in flight.
#[derive(Debug, Default)]
struct State {
    cache: HashMap<String, Answer>,
    /// Runs in flight, by account and registry: images of one registry share a run, and registries do not wait for each other.
    in_flight: HashMap<String, watch::Receiver<Option<Outcome>>>,
}

/// Result of a run: the cache key of the response, and its credentials.
type Outcome = Result<(String, Arc<Keyring>), String>;

/// Possible cache keys of a response for an image.
#[derive(Debug, Clone)]
struct Keys {
    image: String,
    registry: String,
    global: String,
}

impl Keys {
    fn of(image: &str, repository: &str, who: &str) -> Self {
        Self {
            image: format!("{who}\0image {image}"),
            registry: format!("{who}\0registry {}", image_name::registry(repository)),
            global: format!("{who}\0global"),
        }
    }

    fn all(&self) -> [&String; 3] {
        [&self.image, &self.registry, &self.global]
    }
}

#[derive(Debug, Clone)]
struct Answer {
    keyring: Arc<Keyring>,
    until: Duration,
}

/// All configured plugins, in the order of the file.
#[derive(Debug)]
pub struct Plugins {
    plugins: Vec<Arc<Plugin>>,
    clock: Clock,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Response {
    api_version: String,
    kind: String,
    cache_key_type: String,
    #[serde(default)]
    cache_duration: Option<String>,
    #[serde(default)]
    auth: BTreeMap<String, ResponseAuth>,
}

#[derive(Deserialize)]
struct ResponseAuth {
    #[serde(default)]
    username: String,
    #[serde(default)]
    password: String,
}

impl Plugins {
    /// Reads the configuration; programs are in `bin_dir`.
    ///
    /// # Errors
    /// The file cannot be read, has an unknown or invalid field, or names a program that does not exist.
    pub fn load(config: &Path, bin_dir: &Path, clock: Clock) -> Result<Self, ConfigError> {
        let error = |problem: String| ConfigError { path: config.to_owned(), problem };
        let text = std::fs::read_to_string(config).map_err(|e| error(e.to_string()))?;
        let file: ConfigFile = serde_saphyr::from_str(&text).map_err(|e| error(e.to_string()))?;
        if file.kind != "CredentialProviderConfig" || !file.api_version.starts_with("kubelet.config.k8s.io/")
        {
            return Err(error(format!(
                "want CredentialProviderConfig of kubelet.config.k8s.io, not {} of {}",
                file.kind, file.api_version
            )));
        }
        let plugins =
            file.providers.into_iter().map(|p| Plugin::new(p, bin_dir).map(Arc::new).map_err(error));
        Ok(Self { plugins: plugins.collect::<Result<_, _>>()?, clock })
    }

    /// Returns the service account requirements of the plugins for this repository, by index.
    pub fn wanted<'a>(
        &'a self,
        repository: &'a str,
    ) -> impl Iterator<Item = (usize, &'a TokenAttributes)> + 'a {
        let all = self.plugins.iter().enumerate().filter(|(_, p)| p.is_for(repository));
        all.filter_map(|(place, p)| Some((place, p.config.token_attributes.as_ref()?)))
    }

    /// Returns the credentials of all plugins for a repository, each with the service account that it was issued for. A plugin that
    /// fails is logged and returns none.
    pub async fn lookup(
        &self,
        image: &str,
        repository: &str,
        accounts: &PluginAccounts,
    ) -> Vec<(Credential, Option<ImagePullServiceAccount>)> {
        let mut out = Vec::new();
        for (place, plugin) in self.plugins.iter().enumerate().filter(|(_, p)| p.is_for(repository)) {
            let account = match (&plugin.config.token_attributes, accounts.get(&place)) {
                (None, _) => None,
                (Some(_), Some(None)) => continue,
                (Some(t), None) if t.require_service_account => continue,
                (Some(_), None) => None,
                (Some(_), Some(Some(account))) => Some(account),
            };
            match self.ask(plugin, image, repository, account).await {
                Ok(keyring) => {
                    let used = account.map(|a| a.account.clone());
                    out.extend(keyring.lookup(repository).into_iter().map(|c| (c, used.clone())));
                }
                Err(why) => {
                    tracing::warn!(
                        plugin = plugin.config.name,
                        image,
                        why,
                        "credential provider gave no answer"
                    );
                }
            }
        }
        out
    }

    /// Returns the plugin's response for an image: from the cache, from a run in flight, or from a new run. Dropping the call does
    /// not end the run.
    async fn ask(
        &self,
        plugin: &Arc<Plugin>,
        image: &str,
        repository: &str,
        account: Option<&PluginAccount>,
    ) -> Result<Arc<Keyring>, String> {
        let attributes = plugin.config.token_attributes.as_ref();
        let by_token = attributes.is_some_and(|t| t.cache_type == "Token");
        let who = account.map_or_else(String::new, |a| {
            if by_token { format!("{}\0{}", a.token, a.key()) } else { a.key() }
        });
        let keys = Keys::of(image, repository, &who);
        loop {
            let mut run = match plugin.known_or_run(image, &keys, account, &self.clock) {
                Ok(known) => return Ok(known),
                Err(run) => run,
            };
            let ended = run.wait_for(Option::is_some).await;
            let outcome = ended.ok().and_then(|outcome| outcome.clone());
            let (key, keyring) = outcome.unwrap_or_else(|| Err("its run was cut off".to_owned()))?;
            // The response of a run for another image of the registry may apply to that image only.
            if keys.all().contains(&&key) {
                return Ok(keyring);
            }
        }
    }
}

impl Plugin {
    fn new(config: ProviderConfig, bin_dir: &Path) -> Result<Self, String> {
        let name = &config.name;
        if name.is_empty() || name.contains(['/', ' ']) || name == "." || name == ".." {
            return Err(format!("providers.name: {name:?} is not the name of a file"));
        }
        let program = bin_dir.join(name);
        if !program.is_file() {
            return Err(format!("providers.name: there is no program {}", program.display()));
        }
        if config.match_images.is_empty() {
            return Err(format!("providers.matchImages of {name}: at least one is wanted"));
        }
        if !config.api_version.starts_with(&format!("{API_GROUP}/v1")) {
            return Err(format!("providers.apiVersion of {name}: {:?} is not supported", config.api_version));
        }
        let default_cache = go_duration(&config.default_cache_duration)
            .ok_or_else(|| format!("providers.defaultCacheDuration of {name} is not a duration"))?;
        if let Some(t) = &config.token_attributes {
            t.check().map_err(|why| format!("providers.tokenAttributes of {name}: {why}"))?;
        }
        Ok(Self { config, program, default_cache, state: Mutex::default(), runs: Semaphore::new(RUNS) })
    }

    /// Returns the cached response, or else the run in flight for this account and registry, which is started if there is none.
    fn known_or_run(
        self: &Arc<Self>,
        image: &str,
        keys: &Keys,
        account: Option<&PluginAccount>,
        clock: &Clock,
    ) -> Result<Arc<Keyring>, watch::Receiver<Option<Outcome>>> {
        let mut state = self.state.lock();
        let now = clock.boot();
        state.cache.retain(|_, a| a.until > now);
        if let Some(known) = keys.all().into_iter().find_map(|k| state.cache.get(k)) {
            return Ok(Arc::clone(&known.keyring));
        }
        // A run that was aborted leaves its entry without a result.
        if let Some(run) = state.in_flight.get(&keys.registry).filter(|run| run.has_changed().is_ok()) {
            return Err(run.clone());
        }
        let (ended, run) = watch::channel(None);
        state.in_flight.insert(keys.registry.clone(), run.clone());
        let (plugin, keys, clock) = (Arc::clone(self), keys.clone(), clock.clone());
        let (image, account) = (image.to_owned(), account.cloned());
        drop(task::spawn("credential provider", async move {
            let answered = plugin.run(&image, account.as_ref()).await;
            let outcome = plugin.keep(answered, &keys, &clock);
            plugin.state.lock().in_flight.remove(&keys.registry);
            ended.send_replace(Some(outcome));
        }));
        Err(run)
    }

    /// Caches a response for its duration.
    fn keep(&self, answered: Result<Response, String>, keys: &Keys, clock: &Clock) -> Outcome {
        let response = answered?;
        let key = match response.cache_key_type.as_str() {
            "Image" => &keys.image,
            "Registry" => &keys.registry,
            "Global" => &keys.global,
            other => return Err(format!("cacheKeyType {other:?} is not Image, Registry or Global")),
        };
        let life = match &response.cache_duration {
            Some(text) => go_duration(text).ok_or("cacheDuration is not a duration")?,
            None => self.default_cache,
        };
        let entries = response
            .auth
            .into_iter()
            .map(|(k, a)| (k, Credential { username: a.username, password: a.password }));
        let keyring = Arc::new(Keyring::new(entries.collect()));
        let cache = &mut self.state.lock().cache;
        if !life.is_zero() && cache.len() < CACHED {
            let until = clock.boot().saturating_add(life);
            cache.insert(key.clone(), Answer { keyring: Arc::clone(&keyring), until });
        }
        Ok((key.clone(), keyring))
    }

    fn is_for(&self, repository: &str) -> bool {
        self.config.match_images.iter().any(|pattern| keyring::matches(pattern, repository))
    }

    /// Runs the program with a request on stdin once one of [`RUNS`] slots is free. Returns its output and exit status. Dropping
    /// the call kills the program.
    async fn exchange(
        &self,
        request: String,
    ) -> Result<(Vec<u8>, Vec<u8>, std::process::ExitStatus), String> {
        let text = |e: std::io::Error| e.to_string();
        let _place = self.runs.acquire().await.map_err(|e| e.to_string())?;
        let mut child = tokio::process::Command::new(&self.program)
            .args(&self.config.args)
            .envs(self.config.env.iter().map(|e| (&e.name, &e.value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(text)?;
        let mut stdin = child.stdin.take().ok_or("no stdin")?;
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let write = async {
            // A program that does not read its request may still respond.
            let _ = stdin.write_all(request.as_bytes()).await;
            drop(stdin);
            Ok::<(), String>(())
        };
        let answer = async {
            let bytes = read(stdout, MAX_ANSWER.saturating_add(1), false).await.map_err(text)?;
            if u64::try_from(bytes.len()).is_ok_and(|length| length > MAX_ANSWER) {
                return Err(format!("its answer is longer than {MAX_ANSWER} bytes"));
            }
            Ok(bytes)
        };
        let said = async { read(stderr, MAX_SAID, true).await.map_err(text) };
        let ((), stdout, stderr) = tokio::try_join!(write, answer, said)?;
        let status = child.wait().await.map_err(text)?;
        Ok((stdout, stderr, status))
    }

    async fn run(&self, image: &str, account: Option<&PluginAccount>) -> Result<Response, String> {
        let mut request: Value = json!({
            "apiVersion": self.config.api_version, "kind": "CredentialProviderRequest", "image": image,
        });
        if let Some(account) = account {
            request["serviceAccountToken"] = json!(account.token);
            if !account.annotations.is_empty() {
                request["serviceAccountAnnotations"] = json!(account.annotations);
            }
        }
        let work = self.exchange(request.to_string());
        let (stdout, stderr, status) = tokio::time::timeout(LIMIT, work)
            .await
            .map_err(|_| format!("no answer within {}s", LIMIT.as_secs()))??;
        if !status.success() {
            return Err(format!("{status}: {}", String::from_utf8_lossy(&stderr).trim()));
        }
        // The output may contain credentials, so only the position of an error is reported.
        let response: Response = serde_json::from_slice(&stdout)
            .map_err(|e| format!("its answer is malformed at line {} column {}", e.line(), e.column()))?;
        if response.kind != "CredentialProviderResponse" || response.api_version != self.config.api_version {
            return Err(format!("its answer is {} of {}", response.kind, response.api_version));
        }
        Ok(response)
    }
}

/// Reads at most `most` bytes. With `drops` the rest is read and discarded, so that the writer is never blocked.
async fn read(from: Option<impl AsyncRead + Unpin>, most: u64, drops: bool) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let Some(mut from) = from else { return Ok(bytes) };
    (&mut from).take(most).read_to_end(&mut bytes).await?;
    if drops {
        tokio::io::copy(&mut from, &mut tokio::io::sink()).await?;
    }
    Ok(bytes)
}

/// Parses a Go duration of whole units, such as `12h`, `1h30m`, `0s`.
fn go_duration(text: &str) -> Option<Duration> {
    if text == "0" {
        return Some(Duration::ZERO);
    }
    humantime::parse_duration(text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    struct Scene {
        dir: tempfile::TempDir,
        clock: Clock,
    }

    impl Scene {
        fn new() -> Self {
            let clock = Clock::fixed(jiff::Timestamp::UNIX_EPOCH, Duration::from_secs(100));
            Self { dir: tempfile::tempdir().unwrap(), clock }
        }

        // A plugin that counts its runs and returns its request as the user name.
        fn plugin(&self, name: &str, body: &str) {
            let path = self.dir.path().join(name);
            let dir = self.dir.path().display();
            let script =
                format!("#!/bin/sh\nread -r request\necho \"$request\" >> {dir}/{name}.asked\n{body}\n");
            std::fs::write(&path, script).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        }

        fn load(&self, providers: &Value) -> Result<Plugins, ConfigError> {
            let config = self.dir.path().join("config.yaml");
            let file = json!({"apiVersion": "kubelet.config.k8s.io/v1", "kind": "CredentialProviderConfig",
                "providers": providers});
            std::fs::write(&config, file.to_string()).unwrap();
            Plugins::load(&config, self.dir.path(), self.clock.clone())
        }

        fn asked(&self, name: &str) -> Vec<Value> {
            let text =
                std::fs::read_to_string(self.dir.path().join(format!("{name}.asked"))).unwrap_or_default();
            text.lines().map(|l| serde_json::from_str(l).unwrap()).collect()
        }
    }

    fn provider(name: &str) -> Value {
        json!({"name": name, "matchImages": ["*.test", "*.test:5000/team"], "defaultCacheDuration": "1h",
            "apiVersion": "credentialprovider.kubelet.k8s.io/v1"})
    }

    fn answer(key_type: &str, duration: &str) -> String {
        format!(
            r#"cat <<END
{{"apiVersion": "credentialprovider.kubelet.k8s.io/v1", "kind": "CredentialProviderResponse",
 "cacheKeyType": "{key_type}", {duration} "auth": {{"*.test": {{"username": "$WHO", "password": "$1"}},
 "other.example": {{"username": "no", "password": "no"}}}}}}
END"#
        )
    }

    async fn lookup(plugins: &Plugins, image: &str) -> Vec<(String, String)> {
        let found = plugins.lookup(image, &image_name::repository(image), &PluginAccounts::new()).await;
        found.into_iter().map(|(c, _)| (c.username, c.password)).collect()
    }

    #[tokio::test]
    async fn a_plugin_is_asked_for_images_it_matches_and_its_answer_is_kept() {
        for (key_type, duration, asked) in [
            ("Image", "", 3),
            ("Registry", "", 2),
            ("Global", "", 1),
            ("Registry", r#""cacheDuration": "0s","#, 4),
        ] {
            let scene = Scene::new();
            scene.plugin("p", &answer(key_type, duration));
            let mut config = provider("p");
            config["args"] = json!(["secret"]);
            config["env"] = json!([{"name": "WHO", "value": "me"}]);
            let plugins = scene.load(&json!([config])).unwrap();
            for image in ["a.test/x:1", "a.test/y:1", "b.test/x:1", "b.test/x:1"] {
                let want = [("me".to_owned(), "secret".to_owned())];
                assert_eq!(lookup(&plugins, image).await, want, "{key_type} {image}");
            }
            assert_eq!(scene.asked("p").len(), asked, "{key_type} {duration}");
            assert_eq!(
                scene.asked("p")[0],
                json!({"apiVersion": "credentialprovider.kubelet.k8s.io/v1",
                    "kind": "CredentialProviderRequest", "image": "a.test/x:1"})
            );
            assert!(lookup(&plugins, "a.test:5000/other/x:1").await.is_empty());
            assert_eq!(scene.asked("p").len(), asked, "an image it does not match is not asked for");
        }
    }

    #[tokio::test]
    async fn a_run_for_one_registry_holds_up_no_other_and_is_shared_by_the_images_of_its_own() {
        let scene = Scene::new();
        let go = scene.dir.path().join("go");
        let slow = format!(
            "case $request in *slow.test*) while [ ! -e {} ]; do sleep 0.05; done;; esac",
            go.display()
        );
        scene.plugin("p", &format!("{slow}\n{}", answer("Registry", "")));
        let plugins = Arc::new(scene.load(&json!([provider("p")])).unwrap());
        let one = |image: &'static str| {
            let plugins = Arc::clone(&plugins);
            task::spawn("lookup", async move { lookup(&plugins, image).await.len() })
        };
        let slow = [one("slow.test/a"), one("slow.test/b"), one("slow.test/a")];
        let quick = tokio::time::timeout(Duration::from_secs(20), one("quick.test/a")).await;
        assert_eq!(quick.expect("another registry is answered meanwhile").unwrap(), 1);
        assert!(slow.iter().all(|lookup| !lookup.is_finished()));
        std::fs::write(go, "").unwrap();
        for lookup in slow {
            assert_eq!(lookup.await.unwrap(), 1);
        }
        assert_eq!(scene.asked("p").len(), 2, "one run each");
        assert!(plugins.plugins[0].state.lock().in_flight.is_empty());
    }

    #[tokio::test]
    async fn images_that_share_a_run_ask_again_where_its_answer_is_for_one_image_alone() {
        let scene = Scene::new();
        scene.plugin("p", &format!("sleep 0.2\n{}", answer("Image", "")));
        let plugins = scene.load(&json!([provider("p")])).unwrap();
        let (a, again, b) = tokio::join!(
            lookup(&plugins, "a.test/x"),
            lookup(&plugins, "a.test/x"),
            lookup(&plugins, "a.test/y")
        );
        assert_eq!((a.len(), again.len(), b.len()), (1, 1, 1));
        assert_eq!(scene.asked("p").len(), 2);
    }

    #[tokio::test]
    async fn an_answer_without_end_and_a_flood_on_stderr_are_bounded() {
        let scene = Scene::new();
        scene.plugin("p", "cat /dev/zero");
        let plugins = scene.load(&json!([provider("p")])).unwrap();
        let error = plugins.plugins[0].run("a.test/x", None).await.err().unwrap();
        assert_eq!(error, "its answer is longer than 1048576 bytes");
        scene.plugin("p", "head -c 10000000 /dev/zero | tr '\\0' e >&2; exit 3");
        let error = plugins.plugins[0].run("a.test/x", None).await.err().unwrap();
        assert_eq!(error, format!("exit status: 3: {}", "e".repeat(256)));
    }

    #[tokio::test]
    async fn an_answer_ends_with_its_time() {
        let scene = Scene::new();
        scene.plugin("p", &answer("Global", r#""cacheDuration": "10m","#));
        let plugins = scene.load(&json!([provider("p")])).unwrap();
        lookup(&plugins, "a.test/x").await;
        scene.clock.advance(Duration::from_secs(599));
        lookup(&plugins, "a.test/x").await;
        assert_eq!(scene.asked("p").len(), 1);
        scene.clock.advance(Duration::from_secs(1));
        lookup(&plugins, "a.test/x").await;
        assert_eq!(scene.asked("p").len(), 2);
    }

    #[tokio::test]
    async fn a_plugin_that_fails_gives_nothing_and_costs_the_others_nothing() {
        let scene = Scene::new();
        scene.plugin("exits", "exit 3");
        scene.plugin("garbage", "echo hunter2");
        scene.plugin("wrong", r#"echo '{"apiVersion": "x/v1", "kind": "Other", "cacheKeyType": "Image"}'"#);
        scene.plugin("works", &answer("Image", ""));
        let all: Vec<Value> = ["exits", "garbage", "wrong", "works"].into_iter().map(provider).collect();
        let plugins = scene.load(&json!(all)).unwrap();
        assert_eq!(lookup(&plugins, "a.test/x").await.len(), 1);
        let why = plugins.plugins[1].run("a.test/x", None).await.err().unwrap();
        assert!(!why.contains("hunter2"), "{why}");
    }

    #[tokio::test]
    async fn a_token_is_handed_over_only_where_it_is_wanted() {
        let scene = Scene::new();
        scene.plugin("plain", &answer("Global", ""));
        scene.plugin("wants", &answer("Global", ""));
        let mut wants = provider("wants");
        wants["tokenAttributes"] = json!({"serviceAccountTokenAudience": "registry", "cacheType": "ServiceAccount",
            "requireServiceAccount": true});
        let plugins = scene.load(&json!([provider("plain"), wants])).unwrap();
        let wanted: Vec<_> =
            plugins.wanted("a.test/x").map(|(i, t)| (i, t.service_account_token_audience.as_str())).collect();
        assert_eq!(wanted, [(1, "registry")]);
        assert_eq!(plugins.wanted("a.example/x").count(), 0);
        let ask = async |who: Option<&str>| {
            let accounts = who.map(|w| (1, Some(account(w, &[])))).into_iter().collect();
            plugins.lookup("a.test/x", "a.test/x", &accounts).await.len()
        };
        assert_eq!(ask(None).await, 1, "without an account only the other answers");
        assert_eq!((ask(Some("a")).await, ask(Some("b")).await, ask(Some("a")).await), (2, 2, 2));
        let tokens: Vec<Value> =
            scene.asked("wants").iter().map(|r| r["serviceAccountToken"].clone()).collect();
        assert_eq!(tokens, [json!("token of a"), json!("token of b")]);
        assert!(scene.asked("plain").iter().all(|r| r.get("serviceAccountToken").is_none()));
    }

    fn account(name: &str, annotations: &[(&str, &str)]) -> PluginAccount {
        PluginAccount {
            token: format!("token of {name}"),
            account: ImagePullServiceAccount { name: name.to_owned(), ..ImagePullServiceAccount::default() },
            annotations: annotations.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
        }
    }

    #[tokio::test]
    async fn each_plugin_gets_the_token_that_is_for_it_and_one_that_may_not_know_the_pod_is_not_asked() {
        let scene = Scene::new();
        let mut all = Vec::new();
        for (name, require) in [("first", true), ("second", true), ("third", false)] {
            scene.plugin(name, &answer("Global", ""));
            let mut p = provider(name);
            p["tokenAttributes"] = json!({"serviceAccountTokenAudience": name, "cacheType": "Token",
                "requireServiceAccount": require});
            all.push(p);
        }
        let plugins = scene.load(&json!(all)).unwrap();
        let accounts = |third: Option<PluginAccount>| {
            [(0, Some(account("for first", &[]))), (1, Some(account("for second", &[]))), (2, third)].into()
        };
        assert_eq!(plugins.lookup("a.test/x", "a.test/x", &accounts(None)).await.len(), 2);
        for name in ["first", "second"] {
            let asked = scene.asked(name);
            assert_eq!(asked.len(), 1);
            assert_eq!(asked[0]["serviceAccountToken"], json!(format!("token of for {name}")));
        }
        assert_eq!(scene.asked("third").len(), 0);
        assert_eq!(plugins.lookup("a.test/x", "a.test/x", &PluginAccounts::new()).await.len(), 1);
        assert_eq!(scene.asked("third")[0].get("serviceAccountToken"), None, "it does not need one");
    }

    #[tokio::test]
    async fn annotations_of_the_account_that_are_asked_for_are_handed_over_and_make_another_answer() {
        let scene = Scene::new();
        scene.plugin("p", &answer("Global", ""));
        let mut config = provider("p");
        config["tokenAttributes"] = json!({"serviceAccountTokenAudience": "a", "cacheType": "ServiceAccount",
            "requireServiceAccount": true, "requiredServiceAccountAnnotationKeys": ["x/must"],
            "optionalServiceAccountAnnotationKeys": ["x/may"]});
        let plugins = scene.load(&json!([config])).unwrap();
        let (_, attributes) = plugins.wanted("a.test/x").next().unwrap();
        let of = |all: &[(&str, &str)]| attributes.select(&account("", all).annotations);
        assert_eq!(of(&[("x/may", "1"), ("x/other", "2")]), None, "one that it needs is missing");
        let told = of(&[("x/must", "1"), ("x/other", "2")]).unwrap();
        assert_eq!(told, account("", &[("x/must", "1")]).annotations);
        assert_eq!(of(&[("x/must", "1"), ("x/may", "2")]).unwrap().len(), 2);
        for (value, asked) in [("1", 1), ("1", 1), ("2", 2)] {
            let accounts = [(0, Some(account("a", &[("x/must", value)])))].into();
            plugins.lookup("a.test/x", "a.test/x", &accounts).await;
            assert_eq!(scene.asked("p").len(), asked);
        }
        assert_eq!(scene.asked("p")[1]["serviceAccountAnnotations"], json!({"x/must": "2"}));
    }

    #[test]
    fn a_bad_configuration_is_refused_by_field() {
        let scene = Scene::new();
        scene.plugin("p", "");
        let with = |field: &str, value: Value| {
            let mut p = provider("p");
            p[field] = value;
            p
        };
        for (config, want) in [
            (provider("absent"), "there is no program"),
            (with("name", json!("../p")), "providers.name"),
            (with("matchImages", json!([])), "providers.matchImages"),
            (with("apiVersion", json!("x/v1")), "providers.apiVersion"),
            (with("defaultCacheDuration", json!("soon")), "providers.defaultCacheDuration"),
            (with("surprise", json!(1)), "surprise"),
            (
                with(
                    "tokenAttributes",
                    json!({"serviceAccountTokenAudience": "a", "cacheType": "ServiceAccount",
                    "requireServiceAccount": false, "requiredServiceAccountAnnotationKeys": ["a/b"]}),
                ),
                "requiredServiceAccountAnnotationKeys",
            ),
            (
                with(
                    "tokenAttributes",
                    json!({"serviceAccountTokenAudience": "a", "cacheType": "ServiceAccount",
                    "requireServiceAccount": true, "requiredServiceAccountAnnotationKeys": ["a/b"],
                    "optionalServiceAccountAnnotationKeys": ["a/b"]}),
                ),
                "twice",
            ),
        ] {
            let error = scene.load(&json!([config])).unwrap_err().to_string();
            assert!(error.contains(want), "{error}");
        }
    }
}
