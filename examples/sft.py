"""Fine-tune a LoRA adapter on worded arithmetic, from Python: python examples/sft.py MODEL [OUTPUT_DIR]."""

import sys

from datasets import Dataset
from peft import LoraConfig

from strop import SFTConfig, SFTTrainer
from strop.data.samples.arithmetic import arithmetic_rows


def rows(num: int, split: str) -> Dataset:
    return Dataset.from_list(arithmetic_rows(num, split)).remove_columns("answer")


def main(model: str, output_dir: str = "sft-example") -> None:
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=output_dir,
            learning_rate=2e-3,
            warmup_steps=2,
            per_device_train_batch_size=8,
            num_train_epochs=1,
            max_length=256,
            logging_steps=5,
            eval_strategy="epoch",
        ),
        train_dataset=rows(160, "train"),
        eval_dataset=rows(24, "heldout"),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main(*sys.argv[1:])
