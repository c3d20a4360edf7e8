import lightning.pytorch as L
import torch

from lit_efficient import AutoencoderConfig, Autoencoding, DigitImages


def trainer(tmp_path, **arguments) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
        **arguments,
    )


def test_it_learns_to_reconstruct_and_loads_from_its_checkpoint(tmp_path):
    L.seed_everything(0, verbose=False)
    module, data = Autoencoding(AutoencoderConfig(latent_channels=2, width=8)), DigitImages(image_size=16)
    module.configure_model()
    (before,) = trainer(tmp_path).validate(module, data, verbose=False)
    run = trainer(tmp_path, max_steps=150, limit_val_batches=0)
    run.fit(module, data)
    (after,) = trainer(tmp_path).validate(module, data, verbose=False)
    assert after["val/loss"] < 0.3 * before["val/loss"]
    assert after["val/psnr_db"] > before["val/psnr_db"] + 5
    assert run.optimizers[0].param_groups[0]["lr"] < 1e-9

    run.save_checkpoint(tmp_path / "a.ckpt")
    loaded = Autoencoding.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True).eval()
    images = torch.rand(2, 1, 16, 16)
    assert torch.equal(loaded(images), module.eval()(images))
