//! Imports an OCI image archive into containerd, through its content store and image service.
//!
//! Any channel to these services works: containerd's own socket, or cri-proxy's admin socket, which forwards
//! unknown services.

use std::collections::HashMap;
use std::io::{Cursor, Read, Seek, SeekFrom};
use std::path::Path;
use std::time::Duration;

use containerd_client::services::v1::content_client::ContentClient;
use containerd_client::services::v1::images_client::ImagesClient;
use containerd_client::services::v1::leases_client::LeasesClient;
use containerd_client::services::v1::{
    CreateImageRequest, CreateRequest, DeleteRequest, Image, InfoRequest, UpdateImageRequest, WriteAction,
    WriteContentRequest,
};
use containerd_client::types::Descriptor;
use quintlet_cri_api::v1::image_service_client::ImageServiceClient;
use quintlet_cri_api::v1::{ImageSpec, ImageStatusRequest};
use serde::Deserialize;
use tokio::time::Instant;
use tonic::transport::Channel;
use tonic::{Code, Request};

use crate::Error;

/// Namespace of the CRI.
const NAMESPACE: &str = "k8s.io";

/// Bytes per message: a quarter of the default limit of gRPC, since a proxy may have a lower limit than
/// containerd.
const CHUNK: usize = 1 << 20;

/// Size limit of a manifest, index or configuration, as in containerd.
const MAX_JSON: u64 = 8 << 20;

/// Longest time until the CRI shows an image.
const VISIBLE: Duration = Duration::from_secs(10);

/// Interval between checks.
const VISIBLE_STEP: Duration = Duration::from_millis(20);

/// A readable archive.
pub trait Source: Read + Seek + Send {}
impl<T: Read + Seek + Send> Source for T {}

/// An imported image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Imported {
    /// Reference of the image.
    pub name: String,
    /// Digest of its manifest or index.
    pub digest: String,
}

/// Imports an archive in memory; see [`import_from`].
///
/// # Errors
/// Fails as [`import_from`] does.
pub async fn import(channel: Channel, archive: Vec<u8>, name: Option<&str>) -> Result<Vec<String>, Error> {
    let imported = import_from(channel, Cursor::new(archive), name).await?;
    Ok(imported.into_iter().map(|i| i.name).collect())
}

/// Imports an archive file; see [`import_from`].
///
/// # Errors
/// Fails as [`import_from`] does, or if the file cannot be opened.
pub async fn import_file(channel: Channel, path: &Path, name: Option<&str>) -> Result<Vec<Imported>, Error> {
    let file = std::fs::File::open(path).map_err(Error::file("open", path))?;
    import_from(channel, std::io::BufReader::new(file), name).await
}

/// Imports the images of an uncompressed OCI archive, and waits until the CRI shows them. Existing blobs are
/// not sent again, so the call may be repeated.
///
/// `name` replaces the name in the archive, which must then have one image.
///
/// # Errors
/// Fails if the archive is unreadable or incomplete, if a call fails, or if the CRI does not show an image
/// within 10 s.
pub async fn import_from(
    channel: Channel,
    source: impl Source,
    name: Option<&str>,
) -> Result<Vec<Imported>, Error> {
    let mut archive = Archive::open(source)?;
    let images = archive.images(name)?;
    let mut store = Store { channel: channel.clone(), lease: format!("quintlet-import-{}", unique(&images)) };
    store.create_lease().await?;
    let written = store.write_images(&mut archive, &images).await;
    store.delete_lease().await;
    written?;
    for image in &images {
        wait_visible(channel.clone(), &image.name).await?;
    }
    Ok(images.into_iter().map(|i| Imported { name: i.name, digest: i.target.digest }).collect())
}

/// Returns a unique lease name, since concurrent imports of the same images must not share a lease.
fn unique(images: &[Named]) -> String {
    let mut seed = std::process::id().to_string();
    for image in images {
        seed.push_str(&image.name);
        seed.push_str(&image.target.digest);
    }
    crate::oci::digest(format!("{seed}{:?}", std::thread::current().id()).as_bytes())[7..23].to_owned()
}

struct Named {
    name: String,
    target: Desc,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Desc {
    media_type: String,
    digest: String,
    size: u64,
    #[serde(default)]
    annotations: HashMap<String, String>,
}

/// A manifest or an index: the fields of both that refer to other blobs.
#[derive(Debug, Deserialize)]
struct Links {
    #[serde(default)]
    manifests: Vec<Desc>,
    config: Option<Desc>,
    #[serde(default)]
    layers: Vec<Desc>,
}

impl Links {
    /// Returns the labels by which containerd's garbage collector keeps the referenced blobs.
    fn gc_labels(&self) -> HashMap<String, String> {
        let label =
            |kind: String, desc: &Desc| (format!("containerd.io/gc.ref.content.{kind}"), desc.digest.clone());
        let manifests = self.manifests.iter().enumerate().map(|(i, d)| label(format!("m.{i}"), d));
        let config = self.config.iter().map(|d| label("config".to_owned(), d));
        let layers = self.layers.iter().enumerate().map(|(i, d)| label(format!("l.{i}"), d));
        manifests.chain(config).chain(layers).collect()
    }
}

struct Archive<S> {
    source: S,
    /// Position and size of each file.
    files: HashMap<String, (u64, u64)>,
}

impl<S: Source> Archive<S> {
    fn open(mut source: S) -> Result<Self, Error> {
        let bad = |e: std::io::Error| Error::Archive(e.to_string());
        source.rewind().map_err(bad)?;
        let mut files = HashMap::new();
        let mut tar = tar::Archive::new(&mut source);
        for entry in tar.entries_with_seek().map_err(bad)? {
            let entry = entry.map_err(bad)?;
            let path = entry.path().map_err(bad)?.display().to_string();
            let path = path.trim_start_matches("./").to_owned();
            files.insert(path, (entry.raw_file_position(), entry.size()));
        }
        Ok(Self { source, files })
    }

    fn images(&mut self, name: Option<&str>) -> Result<Vec<Named>, Error> {
        let index = self.json("index.json")?;
        let named: Vec<Named> = index
            .manifests
            .into_iter()
            .map(|target| {
                let annotated = ["io.containerd.image.name", "org.opencontainers.image.ref.name"]
                    .iter()
                    .find_map(|key| target.annotations.get(*key).cloned());
                Named { name: name.map(str::to_owned).or(annotated).unwrap_or_default(), target }
            })
            .collect();
        match (named.len(), name) {
            (0, _) => return Err(Error::Archive("index.json lists no image".to_owned())),
            (1, _) | (_, None) => {}
            (n, Some(_)) => {
                return Err(Error::Archive(format!("it holds {n} images, one name cannot name them all")));
            }
        }
        if let Some(unnamed) = named.iter().find(|n| n.name.is_empty()) {
            return Err(Error::Archive(format!("image {} has no name: give one", unnamed.target.digest)));
        }
        Ok(named)
    }

    fn json(&mut self, path: &str) -> Result<Links, Error> {
        let (at, size) = self.find(path)?;
        if size > MAX_JSON {
            return Err(Error::Archive(format!("{path} is too large ({size} bytes)")));
        }
        let bad = |e: String| Error::Archive(format!("{path}: {e}"));
        self.source.seek(SeekFrom::Start(at)).map_err(|e| bad(e.to_string()))?;
        let mut bytes = Vec::new();
        self.source.by_ref().take(size).read_to_end(&mut bytes).map_err(|e| bad(e.to_string()))?;
        serde_json::from_slice(&bytes).map_err(|e| bad(e.to_string()))
    }

    fn find(&self, path: &str) -> Result<(u64, u64), Error> {
        self.files.get(path).copied().ok_or_else(|| Error::Archive(format!("{path} is not in it")))
    }

    fn has(&self, desc: &Desc) -> bool {
        self.files.contains_key(&blob_path(desc))
    }

    /// Reads up to [`CHUNK`] bytes of a blob at an offset.
    fn chunk(&mut self, desc: &Desc, offset: u64) -> Result<Vec<u8>, Error> {
        let path = blob_path(desc);
        let (at, size) = self.find(&path)?;
        let bad = |e: std::io::Error| Error::Archive(format!("{path}: {e}"));
        self.source.seek(SeekFrom::Start(at + offset)).map_err(bad)?;
        let mut bytes = vec![0; usize::try_from(size - offset).unwrap_or(CHUNK).min(CHUNK)];
        self.source.read_exact(&mut bytes).map_err(bad)?;
        Ok(bytes)
    }
}

fn blob_path(desc: &Desc) -> String {
    format!("blobs/{}", desc.digest.replacen(':', "/", 1))
}

struct Store {
    channel: Channel,
    lease: String,
}

impl Store {
    /// Returns a request in the CRI's namespace with the import's lease, which protects blobs until the image
    /// refers to them.
    fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        let metadata = request.metadata_mut();
        metadata.insert("containerd-namespace", tonic::metadata::MetadataValue::from_static(NAMESPACE));
        if let Ok(lease) = self.lease.parse() {
            metadata.insert("containerd-lease", lease);
        }
        request
    }

    async fn create_lease(&mut self) -> Result<(), Error> {
        let create = CreateRequest { id: self.lease.clone(), labels: HashMap::new() };
        match LeasesClient::new(self.channel.clone()).create(self.request(create)).await {
            Ok(_) => Ok(()),
            Err(e) if e.code() == Code::AlreadyExists => Ok(()),
            Err(e) => Err(Error::call("leases.Create")(e)),
        }
    }

    async fn delete_lease(&mut self) {
        let delete = DeleteRequest { id: self.lease.clone(), sync: false };
        if let Err(e) = LeasesClient::new(self.channel.clone()).delete(self.request(delete)).await {
            tracing::warn!(error = %e, "lease of image import not deleted");
        }
    }

    async fn write_images<S: Source>(
        &mut self,
        archive: &mut Archive<S>,
        images: &[Named],
    ) -> Result<(), Error> {
        for image in images {
            self.write_tree(archive, &image.target).await?;
            self.write_image(image).await?;
        }
        Ok(())
    }

    /// Writes the blobs that a manifest or index refers to, and then the blob itself.
    async fn write_tree<S: Source>(&mut self, archive: &mut Archive<S>, root: &Desc) -> Result<(), Error> {
        // Breadth first, then written in reverse: no blob exists before those that it refers to.
        let mut blobs = vec![(root.clone(), None)];
        let mut next = 0;
        while next < blobs.len() {
            let desc = blobs[next].0.clone();
            if desc.media_type.ends_with("manifest.v1+json")
                || desc.media_type.ends_with("index.v1+json")
                || desc.media_type.ends_with("manifest.v2+json")
                || desc.media_type.ends_with("manifest.list.v2+json")
            {
                let links = archive.json(&blob_path(&desc))?;
                // An archive of one platform may list the manifests of others.
                let children = links.manifests.iter().filter(|d| archive.has(d));
                blobs.extend(children.chain(&links.config).chain(&links.layers).map(|d| (d.clone(), None)));
                blobs[next].1 = Some(links.gc_labels());
            }
            next += 1;
        }
        for (desc, labels) in blobs.into_iter().rev() {
            self.write_blob(archive, &desc, labels.unwrap_or_default()).await?;
        }
        Ok(())
    }

    async fn write_blob<S: Source>(
        &mut self,
        archive: &mut Archive<S>,
        desc: &Desc,
        labels: HashMap<String, String>,
    ) -> Result<(), Error> {
        let mut client = ContentClient::new(self.channel.clone());
        match client.info(self.request(InfoRequest { digest: desc.digest.clone() })).await {
            Ok(_) => return Ok(()),
            Err(e) if e.code() == Code::NotFound => {}
            Err(e) => return Err(Error::call("content.Info")(e)),
        }
        let (_, in_archive) = archive.find(&blob_path(desc))?;
        if in_archive != desc.size {
            let message = format!("{} has {in_archive} bytes, {} were announced", desc.digest, desc.size);
            return Err(Error::Archive(message));
        }
        let first = |action: WriteAction| WriteContentRequest {
            action: action as i32,
            r#ref: format!("{}-{}", self.lease, desc.digest),
            total: desc.size.cast_signed(),
            expected: desc.digest.clone(),
            ..WriteContentRequest::default()
        };
        let (sender, receiver) = quintlet_kit::queue::channel("layers", 2);
        let feed = async {
            let mut offset = 0;
            while offset < desc.size {
                let data = archive.chunk(desc, offset)?;
                let length = data.len() as u64;
                let write =
                    WriteContentRequest { offset: offset.cast_signed(), data, ..first(WriteAction::Write) };
                if sender.send(write).await.is_err() {
                    // The stream has ended and reports its own error.
                    return Ok(());
                }
                offset += length;
            }
            let commit =
                WriteContentRequest { offset: offset.cast_signed(), labels, ..first(WriteAction::Commit) };
            let _ = sender.send(commit).await;
            drop(sender);
            Ok(())
        };
        let request = self.request(tokio_stream::wrappers::ReceiverStream::new(receiver));
        let written = async {
            let mut replies = client.write(request).await?.into_inner();
            while replies.message().await?.is_some() {}
            Ok(())
        };
        let (fed, written): (Result<(), Error>, Result<(), tonic::Status>) = tokio::join!(feed, written);
        fed?;
        match written {
            Ok(()) => Ok(()),
            // A concurrent import was faster.
            Err(e) if e.code() == Code::AlreadyExists => Ok(()),
            Err(e) => Err(Error::call("content.Write")(e)),
        }
    }

    async fn write_image(&mut self, named: &Named) -> Result<(), Error> {
        let image = Image {
            name: named.name.clone(),
            target: Some(Descriptor {
                media_type: named.target.media_type.clone(),
                digest: named.target.digest.clone(),
                size: named.target.size.cast_signed(),
                annotations: HashMap::new(),
            }),
            ..Image::default()
        };
        let mut client = ImagesClient::new(self.channel.clone());
        let create = CreateImageRequest { image: Some(image.clone()), ..CreateImageRequest::default() };
        match client.create(self.request(create)).await {
            Ok(_) => return Ok(()),
            Err(e) if e.code() == Code::AlreadyExists => {}
            Err(e) => return Err(Error::call("images.Create")(e)),
        }
        let update_mask = prost_types::FieldMask { paths: vec!["target".to_owned()] };
        let update = UpdateImageRequest {
            image: Some(image),
            update_mask: Some(update_mask),
            ..UpdateImageRequest::default()
        };
        client.update(self.request(update)).await.map_err(Error::call("images.Update"))?;
        Ok(())
    }
}

/// Waits for the image in the CRI, which learns of it from containerd's events.
async fn wait_visible(channel: Channel, image: &str) -> Result<(), Error> {
    let deadline = Instant::now() + VISIBLE;
    let mut client = ImageServiceClient::new(channel);
    loop {
        let spec = ImageSpec { image: image.to_owned(), ..ImageSpec::default() };
        let status_call = client.image_status(ImageStatusRequest { image: Some(spec), verbose: false });
        let why = match tokio::time::timeout_at(deadline, status_call).await {
            Ok(Ok(reply)) if reply.get_ref().image.is_some() => return Ok(()),
            Ok(Ok(_)) => "not there".to_owned(),
            Ok(Err(e)) => e.message().to_owned(),
            Err(_) => "no answer".to_owned(),
        };
        if Instant::now() + VISIBLE_STEP > deadline {
            return Err(Error::NotVisible { image: image.to_owned(), seconds: VISIBLE.as_secs(), why });
        }
        tokio::time::sleep(VISIBLE_STEP).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oci;

    fn archive(name: &str) -> Vec<u8> {
        oci::Image { name: name.to_owned(), ..oci::Image::default() }.archive().unwrap()
    }

    #[test]
    fn a_given_name_replaces_that_of_the_archive() {
        let mut read = Archive::open(Cursor::new(archive("localhost/a:1"))).unwrap();
        assert_eq!(read.images(None).unwrap()[0].name, "localhost/a:1");
        assert_eq!(read.images(Some("localhost/b:2")).unwrap()[0].name, "localhost/b:2");
    }

    #[test]
    fn a_file_that_is_no_oci_archive_is_reported() {
        for bytes in [Vec::new(), b"not a tar".repeat(200), vec![0; 1024]] {
            let error =
                Archive::open(Cursor::new(bytes)).and_then(|mut a| a.images(None).map(|_| ())).unwrap_err();
            assert!(error.to_string().starts_with("not a usable OCI image archive"), "{error}");
        }
    }
}
