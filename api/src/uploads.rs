//! `/v1/uploads`: archives, brought over pre-signed addresses or in one step.

use std::collections::BTreeMap;

use actors::call::auditing::{self, Whose};
use domain::{UploadId, account::Tenant, directory::Command, hex::hex, upload::Upload};
use futures::{StreamExt as _, TryStreamExt as _};
use hmac::{Hmac, KeyInit as _, Mac as _};
use http::StatusCode;
use poem::{Body, FromRequest, Request, RequestBody, web::Multipart};
use poem_openapi::{
    ApiExtractor, ApiExtractorType, ApiResponse, ExtractParamOptions, OpenApi,
    param::{Path, Query},
    payload::{Json, Payload},
    registry::{MetaMediaType, MetaRequest, MetaSchema, MetaSchemaRef, Registry},
};
use sha2::Sha256;
use subtle::ConstantTimeEq as _;

use crate::{
    Handle, Shared,
    body::upload::{CreateUpload, UploadBody},
    caller::Caller,
    check::Checked,
    envelope::Success,
    error::{ApiError, Problem, path_id},
    repeat::{Gone, keyed, replayed},
};

/// How long the addresses of an upload work.
const VALID_FOR: std::time::Duration = std::time::Duration::from_secs(3600);

pub(crate) struct UploadsApi(pub(crate) Handle);

/// A new upload.
#[derive(ApiResponse)]
pub(crate) enum UploadCreated {
    /// The upload, with its addresses.
    #[oai(status = 201)]
    Created(
        Json<Success<UploadBody>>,
        #[oai(header = "Location")] String,
        #[oai(header = "Idempotency-Replayed")] Option<String>,
    ),
}

type Result<T> = std::result::Result<T, ApiError>;

/// Signs and checks the addresses of uploads.
pub struct UploadLinks;

impl UploadLinks {
    /// The signature of one use of an upload until a time.
    pub fn sign(key: &[u8; 32], purpose: &str, id: UploadId, expires: u64) -> String {
        let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("any length of key fits");
        mac.update(format!("upload\n{purpose}\n{id}\n{expires}").as_bytes());
        hex(&mac.finalize().into_bytes())
    }
}

fn upload_id(text: &str) -> std::result::Result<UploadId, Problem> {
    path_id("upload", text)
}

/// An address that is no upload's of ours.
pub(crate) fn invalid_archive_url() -> Problem {
    let message = "archive_url must be the unexpired archive_url of an upload to this service";
    Problem::new(StatusCode::BAD_REQUEST, "INVALID_ARCHIVE_URL", message)
        .with(serde_json::json!({ "field": "source.archive_url" }))
}

impl Shared {
    fn signed(&self, purpose: &str, suffix: &str, upload: &Upload) -> String {
        let expires = upload.expires_at.seconds();
        let signature = UploadLinks::sign(&self.settings.signing_key, purpose, upload.id, expires);
        let base = &self.settings.public_url;
        format!("{base}/v1/uploads/{}/{suffix}?expires={expires}&signature={signature}", upload.id)
    }

    fn is_signed(&self, purpose: &str, id: UploadId, expires: u64, signature: &str) -> bool {
        let right = UploadLinks::sign(&self.settings.signing_key, purpose, id, expires);
        let in_time = self.service.world.now().seconds() <= expires;
        in_time && bool::from(right.as_bytes().ct_eq(signature.as_bytes()))
    }

    /// The upload that an `archive_url` names; whatever host it names, the signature decides.
    pub(crate) fn upload_of(&self, url: &str) -> std::result::Result<UploadId, Problem> {
        let uri: http::Uri = url.parse().map_err(|_| invalid_archive_url())?;
        let mut parts = uri.path().strip_prefix("/v1/uploads/").unwrap_or_default().split('/');
        let id = parts.next().and_then(|id| id.parse().ok()).ok_or_else(invalid_archive_url)?;
        let is_archive = parts.next() == Some("archive") && parts.next().is_none();
        let query: BTreeMap<&str, &str> = uri
            .query()
            .unwrap_or_default()
            .split('&')
            .filter_map(|pair| pair.split_once('='))
            .collect();
        let expires = query.get("expires").and_then(|text| text.parse().ok()).unwrap_or(0);
        let signature = query.get("signature").copied().unwrap_or_default();
        let ours = is_archive && self.is_signed("archive", id, expires, signature);
        if ours { Ok(id) } else { Err(invalid_archive_url()) }
    }

    fn upload_body(&self, upload: &Upload) -> UploadBody {
        let put = self.signed("put", "content", upload);
        UploadBody::of(upload, put, self.signed("archive", "archive", upload))
    }
}

/// Either a JSON announcement or the file itself.
pub(crate) enum NewUpload {
    Announced(Box<Checked<CreateUpload>>),
    File(Box<Multipart>),
}

impl<'a> ApiExtractor<'a> for NewUpload {
    const TYPES: &'static [ApiExtractorType] = &[ApiExtractorType::RequestObject];
    type ParamType = ();
    type ParamRawType = ();

    fn register(registry: &mut Registry) {
        <Checked<CreateUpload> as Payload>::register(registry);
    }

    fn request_meta() -> Option<MetaRequest> {
        let json = <Checked<CreateUpload> as Payload>::schema_ref();
        let file = MetaSchema::new_with_format("string", "binary");
        let mut form = MetaSchema::new("object");
        form.required = vec!["file"];
        form.properties = vec![("file", MetaSchemaRef::Inline(Box::new(file)))];
        let form = MetaSchemaRef::Inline(Box::new(form));
        Some(MetaRequest {
            description: Some("An announcement, or the file itself as the form field `file`."),
            content: vec![
                MetaMediaType { content_type: "application/json", schema: json },
                MetaMediaType { content_type: "multipart/form-data", schema: form },
            ],
            required: true,
        })
    }

    async fn from_request(
        request: &'a Request,
        body: &mut RequestBody,
        options: ExtractParamOptions<()>,
    ) -> poem::Result<Self> {
        let kind = request.content_type().unwrap_or_default();
        if kind.starts_with("multipart/form-data") {
            let form = <Multipart as FromRequest>::from_request(request, body)
                .await
                .map_err(|_| broken_form())?;
            return Ok(Self::File(Box::new(form)));
        }
        let checked =
            <Checked<CreateUpload> as ApiExtractor<'a>>::from_request(request, body, options);
        Ok(Self::Announced(Box::new(checked.await?)))
    }
}

/// Bytes, whatever type the client calls them.
pub(crate) struct RawBody(Body);

impl<'a> ApiExtractor<'a> for RawBody {
    const TYPES: &'static [ApiExtractorType] = &[ApiExtractorType::RequestObject];
    type ParamType = ();
    type ParamRawType = ();

    fn request_meta() -> Option<MetaRequest> {
        let bytes = MetaSchema::new_with_format("string", "binary");
        let schema = MetaSchemaRef::Inline(Box::new(bytes));
        Some(MetaRequest {
            description: Some("The archive; any Content-Type is taken."),
            content: vec![MetaMediaType { content_type: "application/octet-stream", schema }],
            required: true,
        })
    }

    async fn from_request(
        _: &'a Request,
        body: &mut RequestBody,
        _: ExtractParamOptions<()>,
    ) -> poem::Result<Self> {
        Ok(Self(body.take()?))
    }
}

fn broken_form() -> Problem {
    let message = "the form can't be read; send the archive as the form field `file`";
    Problem::new(StatusCode::BAD_REQUEST, "INVALID_REQUEST", message)
}

#[OpenApi(prefix_path = "/v1", tag = "crate::document::Tag::Uploads")]
impl UploadsApi {
    /// Upload an archive
    ///
    /// With JSON, announces an upload and answers with the address to `PUT` the
    /// bytes to; with `multipart/form-data`, takes the file at once.
    #[oai(path = "/uploads", method = "post", operation_id = "createUpload")]
    async fn create(
        &self,
        caller: Caller,
        request: &Request,
        body: NewUpload,
    ) -> Result<UploadCreated> {
        let tenant = caller.tenant();
        match body {
            NewUpload::Announced(body) => {
                let key = keyed(request, tenant, Some(&body.json))?;
                let upload = self.announced(tenant, body.body);
                let answer = self.0.service.create_upload(upload, key).await?;
                Ok(self.created(&answer.value, answer.replayed))
            }
            NewUpload::File(form) => {
                if request.headers().contains_key("idempotency-key") {
                    let why = "is not taken with multipart/form-data; announce the upload as JSON instead";
                    return Err(Problem::field("Idempotency-Key", why).into());
                }
                Ok(self.created(&self.take_form(tenant, *form).await?, false))
            }
        }
    }

    /// Send the bytes of an upload
    ///
    /// Use `upload_url` as it is.
    #[oai(path = "/uploads/:id/content", method = "put", operation_id = "putUpload")]
    async fn put(
        &self,
        /// The upload.
        id: Path<String>,
        /// From the address.
        expires: Query<u64>,
        /// From the address.
        signature: Query<String>,
        body: RawBody,
    ) -> Result<Json<Success<UploadBody>>> {
        let id = upload_id(&id)?;
        if !self.0.is_signed("put", id, expires.0, &signature.0) {
            let message = "this upload address is not valid any more; announce the upload again";
            return Err(Problem::new(StatusCode::FORBIDDEN, "INVALID_REQUEST", message).into());
        }
        let bytes = body.0.into_bytes_stream().map_err(std::io::Error::other).boxed();
        let upload = self.0.service.receive_upload(id, bytes).await?;
        auditing::belongs_to(Whose::anonymous(upload.tenant));
        Ok(Json(Success::of(self.0.upload_body(&upload))))
    }

    /// Get an upload
    #[oai(path = "/uploads/:id", method = "get", operation_id = "getUpload")]
    async fn get(
        &self,
        caller: Caller,
        /// The upload.
        id: Path<String>,
    ) -> Result<Json<Success<UploadBody>>> {
        let id = upload_id(&id)?;
        let upload = self.0.service.directory().await?.read().upload(caller.tenant(), id)?;
        Ok(Json(Success::of(self.0.upload_body(&upload))))
    }

    /// Delete an upload
    ///
    /// Agents that were built from it stay.
    #[oai(path = "/uploads/:id", method = "delete", operation_id = "deleteUpload")]
    async fn delete(
        &self,
        caller: Caller,
        request: &Request,
        /// The upload.
        id: Path<String>,
    ) -> Result<Gone> {
        let (tenant, id) = (caller.tenant(), upload_id(&id)?);
        let key = keyed(request, tenant, None)?;
        if !self.0.service.is_repeat(key.as_ref()).await? {
            self.0.service.directory().await?.read().upload(tenant, id)?;
        }
        let answer = self.0.service.change(Command::DeleteUpload { id }, key).await?;
        Ok(Gone::of(id, answer.replayed))
    }
}

impl UploadsApi {
    fn announced(&self, tenant: Tenant, body: CreateUpload) -> Upload {
        let world = &self.0.service.world;
        let now = world.now();
        Upload {
            id: world.mint(UploadId::new),
            tenant,
            filename: body.filename,
            size_bytes: body.size_bytes,
            content_type: body.content_type,
            sha256: body.sha256,
            received: None,
            created_at: now,
            expires_at: now.plus(VALID_FOR),
        }
    }

    fn created(&self, upload: &Upload, is_replay: bool) -> UploadCreated {
        let body = Json(Success::of(self.0.upload_body(upload)));
        UploadCreated::Created(body, format!("/v1/uploads/{}", upload.id), replayed(is_replay))
    }

    async fn take_form(&self, tenant: Tenant, mut form: Multipart) -> Result<Upload> {
        while let Some(field) = form.next_field().await.map_err(|_| broken_form())? {
            if field.name() != Some("file") {
                continue;
            }
            let filename = field.file_name().unwrap_or("archive").chars().take(255).collect();
            let announced =
                CreateUpload { filename, size_bytes: None, content_type: None, sha256: None };
            let upload = self.announced(tenant, announced);
            let bytes = Body::from_async_read(field.into_async_read());
            let bytes = bytes.into_bytes_stream().map_err(std::io::Error::other).boxed();
            return Ok(self.0.service.take_upload(upload, bytes).await?);
        }
        Err(Problem::field("file", "is required").into())
    }
}
